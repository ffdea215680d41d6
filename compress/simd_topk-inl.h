// topk's passes over all elements. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#undef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/codecs/topk.h"
#include "compress/simd_kernels.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The place that found elements are written to.
struct Found {
  uint32_t* index;
  uint32_t* bits;
  size_t count = 0;

  HWY_INLINE void Append(V x, hn::Mask<I> mask, uint32_t first) {
    const auto m = hn::RebindMask(U(), mask);
    // Whole vectors, of which the next one covers the rest: storing a part takes Zen 4 100 cycles.
    hn::StoreU(hn::Compress(hn::BitCast(U(), x), m), U(), bits + count);
    hn::StoreU(hn::Compress(hn::Iota(U(), first), m), U(), index + count);
    count += hn::CountTrue(U(), m);
  }
  HWY_INLINE void Append(float x, uint32_t at) {
    bits[count] = BitsOf(x);
    index[count++] = at;
  }
};

template <bool kMomentum>
HWY_INLINE size_t AddAndScanLoop(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                 const Momentum& momentum, size_t n, uint32_t begin,
                                 const Thresholds& keys, uint32_t* HWY_RESTRICT index,
                                 uint32_t* HWY_RESTRICT bits) {
  const F d;
  const V beta = hn::Set(d, momentum.beta);
  const auto below = hn::Set(I(), static_cast<int32_t>(keys.low) - 1);
  // A `sure` of 2^31 wraps around to the largest key, which is a NaN's, and NaNs are not stored.
  const auto unsure = hn::Set(I(), static_cast<int32_t>(keys.sure - 1));
  float* HWY_RESTRICT u = momentum.u;
  Found found{index, bits};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (i % (64 / sizeof(float)) == 0) {
      PrefetchBlock(g + i, 64);
      PrefetchBlock(r + i, 64);
      if constexpr (kMomentum) PrefetchBlock(u + i, 64);
    }
    V x = hn::LoadU(d, g + i), speed = x;
    const V old = hn::LoadU(d, r + i);
    if constexpr (kMomentum) {
      speed = hn::Add(hn::Mul(beta, hn::LoadU(d, u + i)), x);
      x = momentum.nesterov ? hn::Add(x, hn::Mul(beta, speed)) : speed;
    }
    x = hn::Add(old, x);
    const auto hit = hn::Gt(Magnitude(x), below);
    if (HWY_LIKELY(hn::AllFalse(I(), hit))) {
      hn::StoreU(x, d, r + i);
      if constexpr (kMomentum) hn::StoreU(speed, d, u + i);
      continue;
    }
    found.Append(x, hit, begin + static_cast<uint32_t>(i));
    const auto finite =
        hn::RebindMask(d, hn::Lt(Magnitude(x), hn::Set(I(), static_cast<int32_t>(kHugeBits))));
    const auto sure = hn::RebindMask(d, hn::Gt(Magnitude(x), unsure));
    const V rounded = hn::BitCast(d, hn::ShiftLeft<16>(Bf16Bits(x)));
    const V kept = hn::IfThenElse(sure, hn::Sub(x, rounded), x);
    hn::StoreU(hn::IfThenElse(finite, kept, old), d, r + i);
    if constexpr (kMomentum) {
      hn::StoreU(hn::IfThenElse(finite, speed, hn::LoadU(d, u + i)), d, u + i);
    }
  }
  for (; i < n; ++i) {
    float gradient, x, speed = 0;
    memcpy(&gradient, reinterpret_cast<const uint8_t*>(g) + i * sizeof(float), sizeof(float));
    memcpy(&x, reinterpret_cast<uint8_t*>(r) + i * sizeof(float), sizeof(float));
    if constexpr (kMomentum) {
      memcpy(&speed, reinterpret_cast<uint8_t*>(u) + i * sizeof(float), sizeof(float));
      speed = momentum.beta * speed + gradient;
      gradient = momentum.nesterov ? gradient + momentum.beta * speed : speed;
    }
    x = x + gradient;
    if (SelectionKey(x) >= keys.low) found.Append(x, begin + static_cast<uint32_t>(i));
    if (!StoresResidual(x)) continue;
    if (SelectionKey(x) >= keys.sure) x = x - thinwire::FromBf16(thinwire::ToBf16(x));
    memcpy(reinterpret_cast<uint8_t*>(r) + i * sizeof(float), &x, sizeof(float));
    if constexpr (kMomentum) {
      memcpy(reinterpret_cast<uint8_t*>(u) + i * sizeof(float), &speed, sizeof(float));
    }
  }
  return found.count;
}

size_t AddAndScanT(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                   const Thresholds& keys, uint32_t* index, uint32_t* bits) {
  return momentum.u != nullptr ? AddAndScanLoop<true>(g, r, momentum, n, begin, keys, index, bits)
                               : AddAndScanLoop<false>(g, r, momentum, n, begin, keys, index, bits);
}

size_t ScanT(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
             uint32_t* index, uint32_t* bits) {
  const F d;
  const auto below = hn::Set(I(), static_cast<int32_t>(low) - 1);
  const auto above = hn::Set(I(), static_cast<int32_t>(highest));
  Found found{index, bits};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V value = hn::LoadU(d, x + i);
    const auto key = Magnitude(value);
    const auto hit = hn::AndNot(hn::Gt(key, above), hn::Gt(key, below));
    if (!hn::AllFalse(I(), hit)) found.Append(value, hit, begin + static_cast<uint32_t>(i));
  }
  for (; i < n; ++i) {
    float value;
    memcpy(&value, reinterpret_cast<const uint8_t*>(x) + i * sizeof(float), sizeof(float));
    const uint32_t key = SelectionKey(value);
    if (key >= low && key <= highest) found.Append(value, begin + static_cast<uint32_t>(i));
  }
  return found.count;
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
