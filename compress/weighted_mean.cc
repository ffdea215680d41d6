// Compiled once per instruction set, including the oldest: this file has no flags of its own.
#include "compress/weighted_mean.h"

#include "compress/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/weighted_mean.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <memory>

#include "compress/backend.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using D = hn::CappedTag<double, 8>;
inline constexpr size_t kFloats = hn::MaxLanes(F());
inline constexpr size_t kDoubles = hn::MaxLanes(D());
inline constexpr size_t kSums = kProductLanes / kDoubles;
using Sums = hn::Vec<D>[kSums];

HWY_INLINE hn::Vec<D> Load(const float* at) {
  return hn::PromoteTo(D(), hn::LoadU(hn::Rebind<float, D>(), at));
}

HWY_INLINE double Fold(const Sums& sums, const double* rest) {
  alignas(64) double lane[kProductLanes];
  for (size_t t = 0; t < kSums; ++t) hn::Store(sums[t], D(), lane + kDoubles * t);
  for (size_t l = 0; l < kProductLanes; ++l) lane[l] += rest[l];
  for (size_t half = kProductLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

// Adds x * x to *own, and x * mean to *with_mean.
void AddProductsT(const float* HWY_RESTRICT x, const float* HWY_RESTRICT mean, size_t n,
                  double* own, double* with_mean) {
  Sums squares, products;
  for (size_t t = 0; t < kSums; ++t) squares[t] = products[t] = hn::Zero(D());
  size_t i = 0;
  for (; i + kProductLanes <= n; i += kProductLanes) {
#pragma GCC unroll 8
    for (size_t t = 0; t < kSums; ++t) {
      const auto value = Load(x + i + kDoubles * t);
      squares[t] = hn::MulAdd(value, value, squares[t]);
      products[t] = hn::MulAdd(value, Load(mean + i + kDoubles * t), products[t]);
    }
  }
  double more[2][kProductLanes] = {};
  for (size_t l = 0; i + l < n; ++l) {
    more[0][l] = double{x[i + l]} * x[i + l];
    more[1][l] = double{x[i + l]} * mean[i + l];
  }
  *own += Fold(squares, more[0]);
  *with_mean += Fold(products, more[1]);
}

// Stores the first member's values times their factor, or adds those of a further one.
template <bool kFirst>
HWY_INLINE void AddScaled(const float* HWY_RESTRICT x, float factor, size_t n,
                          float* HWY_RESTRICT sum) {
  const auto f = hn::Set(F(), factor);
  size_t i = 0;
  for (; i + kFloats <= n; i += kFloats) {
    auto value = hn::Mul(hn::LoadU(F(), x + i), f);
    if constexpr (!kFirst) value = hn::Add(hn::LoadU(F(), sum + i), value);
    hn::StoreU(value, F(), sum + i);
  }
  for (; i < n; ++i) sum[i] = kFirst ? x[i] * factor : sum[i] + x[i] * factor;
}

void AddScaledT(bool first, const float* x, float factor, size_t n, float* sum) {
  first ? AddScaled<true>(x, factor, n, sum) : AddScaled<false>(x, factor, n, sum);
}

}  // namespace thinwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire {

HWY_EXPORT(AddProductsT);
HWY_EXPORT(AddScaledT);

namespace {

// The mean of `count` values of each member; those of member m begin at values + m * stride.
void MeanOfPiece(const WeightedMeanArgs& args, const float* values, size_t stride, size_t count,
                 float* mean) {
  const size_t members = args.wires.size();
  for (size_t m = 0; m < members; ++m) {
    HWY_DYNAMIC_DISPATCH(AddScaledT)
    (m == 0, values + stride * m, args.factors[m], count, mean);
  }
  double* const own = args.products.data();
  for (size_t m = 0; m < members; ++m) {
    HWY_DYNAMIC_DISPATCH(AddProductsT)
    (values + stride * m, mean, count, own + m, own + members + m);
  }
  double again = 0;  // the same product again, unused
  HWY_DYNAMIC_DISPATCH(AddProductsT)(mean, mean, count, own + 2 * members, &again);
}

}  // namespace

size_t ShardsBytes(const CodecSpec& spec, size_t numel, size_t shard) {
  const size_t full = numel / shard;
  return (full > 0 ? full * EncodedBytes(spec, shard) : 0) + EncodedBytes(spec, numel % shard);
}

absl::Status WeightedMean(const WeightedMeanArgs& args) {
  const Backend& codecs = CpuBackend();
  const size_t members = args.wires.size(), numel = args.mean.size();
  const size_t stride = std::min(args.shard, numel);
  const std::unique_ptr<float[]> values(new float[members * stride]);
  for (size_t begin = 0, at = 0; begin < numel; begin += stride) {
    const size_t count = std::min(stride, numel - begin);
    const size_t bytes = EncodedBytes(args.spec, count);
    for (size_t m = 0; m < members; ++m) {
      const uint8_t* const wire = args.wires[m] + at;
      if (absl::Status bad = CheckWire(args.spec, {wire, bytes}, count); !bad.ok()) return bad;
      codecs.Decode(args.spec, wire, {values.get() + stride * m, count});
    }
    for (size_t done = 0; done < count; done += kProductPiece) {
      MeanOfPiece(args, values.get() + done, stride, std::min(kProductPiece, count - done),
                  args.mean.data() + begin + done);
    }
    at += bytes;
  }
  return absl::OkStatus();
}

}  // namespace thinwire
#endif  // HWY_ONCE
