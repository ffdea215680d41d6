// topk's passes over a stage of elements. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#undef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#endif

#include <hwy/highway.h>

#include <bit>

#include "compress/codecs/topk.h"
#include "compress/simd_kernels.h"
#include "compress/simd_quantise-inl.h"
#include "compress/stages.h"
#include "compress/types.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A pass marks elements in words of bits, one bit each, and reads their places off. Both go without
// branches that depend on the data: one wrong guess of the processor costs as much as
// five vectors, and at a density of 1 % every seventh vector of 16 has a hit.
inline constexpr size_t kWord = 64;
inline constexpr size_t kWordVectors = kWord / kLanes;

// The candidates that a pass found. Place i of its elements is `begin` + i to its caller.
struct Found {
  uint32_t* HWY_RESTRICT index;
  uint32_t* HWY_RESTRICT bits;
  uint32_t begin;
  size_t count = 0;

  // For countr_zero, where GCC would branch on whether a word is empty, which can't be foreseen.
  static constexpr uint64_t kLastBit = uint64_t{1} << 63;

  // Elements i + b of all bits b that are set. Four at a time are written, set or not: few words
  // have more, so that the processor guesses right how often the loop goes around.
  HWY_INLINE void AppendPlaces(uint64_t word, size_t i) {
    const size_t end = count + static_cast<size_t>(std::popcount(word));
    const uint32_t first = begin + static_cast<uint32_t>(i);
    do {
#pragma GCC unroll 4
      for (size_t t = 0; t < 4; ++t) {
        index[count + t] = first + static_cast<uint32_t>(std::countr_zero(word | kLastBit));
        word &= word - 1;
      }
      count += 4;
    } while (HWY_UNLIKELY(count < end));
    count = end;
  }
  HWY_INLINE void Append(float x, size_t i) {
    bits[count] = BitsOf(x);
    index[count++] = begin + static_cast<uint32_t>(i);
  }
  size_t PlaceOf(size_t candidate) const { return index[candidate] - begin; }
};

// AddAndScan on single elements [i, end); returns how many there are now. (By value, so that the
// loop over vectors keeps its own in registers.)
template <bool kMomentum>
HWY_NOINLINE size_t AddAndScanElements(const float* g, float* r, const Momentum& momentum, size_t i,
                                       size_t end, const Thresholds& keys, Found found) {
  for (; i < end; ++i) {
    float gradient = Get<float>(g, i), speed = 0;
    if constexpr (kMomentum) {
      speed = momentum.beta * Get<float>(momentum.velocity, i) + gradient;
      gradient = momentum.nesterov ? gradient + momentum.beta * speed : speed;
    }
    float x = Get<float>(r, i) + gradient;
    if (SelectionKey(x) >= keys.low) found.Append(x, i);
    if (!StoresResidual(x)) continue;
    if (SelectionKey(x) >= keys.sure) x = x - thinwire::FromBf16(thinwire::ToBf16(x));
    Put(r, i, x);
    if constexpr (kMomentum) Put(momentum.velocity, i, speed);
  }
  return found.count;
}

// The lanes of a word's vectors that are found, one bit each.
HWY_INLINE uint64_t MarksOf(const hn::Mask<I>* found) {
  uint64_t marks = 0;
#if HWY_TARGET == HWY_AVX3
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    StoreBits(hn::RebindMask(F(), found[t]), reinterpret_cast<uint8_t*>(&marks), t);
  }
#else
  // Packed to bytes first, four vectors give their bits at once.
  const hn::Repartition<int8_t, I> d8;
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; t += 4) {
    hn::Vec<I> four[4];
    for (size_t j = 0; j < 4; ++j) four[j] = hn::VecFromMask(I(), found[t + j]);
    uint64_t bits = 0;
    hn::StoreMaskBits(d8, hn::MaskFromVec(hn::BitCast(d8, ToBytes(four))),
                      reinterpret_cast<uint8_t*>(&bits));
    marks |= bits << (kLanes * t);
  }
#endif
  return marks;
}

// r = x for the kWord elements from i on, and a mark for each key above `below`. False, and nothing
// is stored, if one of them is not finite.
template <bool kMomentum>
HWY_INLINE bool AddWord(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                        const Momentum& momentum, hn::Vec<I> below, size_t i,
                        uint64_t* HWY_RESTRICT marks) {
  const F d;
  const V beta = hn::Set(d, momentum.beta);
  V x[kWordVectors], speed[kWordVectors];
  hn::Mask<I> found[kWordVectors];
  auto largest = hn::Zero(I());
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    const size_t at = i + kLanes * t;
    x[t] = hn::LoadU(d, g + at);
    if constexpr (kMomentum) {
      speed[t] = hn::Add(hn::Mul(beta, hn::LoadU(d, momentum.velocity + at)), x[t]);
      x[t] = momentum.nesterov ? hn::Add(x[t], hn::Mul(beta, speed[t])) : speed[t];
    }
    x[t] = hn::Add(hn::LoadU(d, r + at), x[t]);
    const auto key = Magnitude(x[t]);
    largest = hn::Max(largest, key);
    found[t] = hn::Gt(key, below);
  }
  *marks = MarksOf(found);
  const auto huge = hn::Set(I(), static_cast<int32_t>(kHugeBits));
  if (HWY_UNLIKELY(!hn::AllTrue(I(), hn::Lt(largest, huge)))) return false;
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    hn::StoreU(x[t], d, r + i + kLanes * t);
    if constexpr (kMomentum) hn::StoreU(speed[t], d, momentum.velocity + i + kLanes * t);
  }
  return true;
}

// Candidates of a stage, from `from` on, get their values from r, where the sure ones leave what
// sending them does. Nothing branches on which ones are sure, and all are stored.
HWY_INLINE void TakeValues(float* r, uint32_t sure, size_t from, const Found& found) {
  const size_t count = found.count - from;
  const uint32_t begin = found.begin;
  const uint32_t* HWY_RESTRICT index = found.index + from;
  uint32_t* HWY_RESTRICT bits = found.bits + from;
  for (size_t c = 0; c < count; ++c) bits[c] = Get<uint32_t>(r, index[c] - begin);
  if (sure > kAbsMask) return;
  const auto below = hn::Set(I(), static_cast<int32_t>(sure) - 1);
  alignas(64) float left[kStage + kLanes];
  for (size_t c = 0; c < count; c += kLanes) {
    const V x = hn::BitCast(F(), hn::LoadU(U(), bits + c));
    const auto sent = hn::BitCast(F(), hn::ShiftLeft<16>(Bf16Bits(x)));
    const auto is_sure = hn::RebindMask(F(), hn::Gt(Magnitude(x), below));
    hn::Store(hn::Sub(x, hn::IfThenElseZero(is_sure, sent)), F(), left + c);
  }
  for (size_t c = 0; c < count; ++c) Put(r, index[c] - begin, left[c]);
}

template <bool kMomentum>
HWY_INLINE size_t AddAndScanLoop(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                 const Momentum& momentum, size_t n, const Thresholds& keys,
                                 Found found) {
  const auto below = hn::Set(I(), static_cast<int32_t>(keys.low) - 1);
  const size_t words = n / kWord;
  size_t taken = 0;
  for (size_t w = 0; w < words; ++w) {
    const size_t i = w * kWord;
    PrefetchBlock(g + i, kWord * sizeof(float));
    PrefetchBlock(r + i, kWord * sizeof(float));
    if constexpr (kMomentum) PrefetchBlock(momentum.velocity + i, kWord * sizeof(float));
    uint64_t marks = 0;
    if (HWY_LIKELY(AddWord<kMomentum>(g, r, momentum, below, i, &marks))) {
      found.AppendPlaces(marks, i);
      continue;
    }
    TakeValues(r, keys.sure, taken, found);
    found.count = AddAndScanElements<kMomentum>(g, r, momentum, i, i + kWord, keys, found);
    taken = found.count;
  }
  TakeValues(r, keys.sure, taken, found);
  return AddAndScanElements<kMomentum>(g, r, momentum, words * kWord, n, keys, found);
}

size_t AddAndScanT(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                   const Thresholds& keys, uint32_t* index, uint32_t* bits) {
  const Found found{index, bits, begin};
  return momentum.velocity != nullptr ? AddAndScanLoop<true>(g, r, momentum, n, keys, found)
                                      : AddAndScanLoop<false>(g, r, momentum, n, keys, found);
}

size_t ScanT(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
             uint32_t* index, uint32_t* bits) {
  const F d;
  const auto below = hn::Set(I(), static_cast<int32_t>(low) - 1);
  const auto above = hn::Set(I(), static_cast<int32_t>(highest));
  Found found{index, bits, begin};
  const size_t words = n / kWord;
  for (size_t w = 0; w < words; ++w) {
    PrefetchBlock(x + w * kWord, kWord * sizeof(float));
    uint64_t marks = 0;
#pragma GCC unroll 16
    for (size_t t = 0; t < kWordVectors; ++t) {
      const auto key = Magnitude(hn::LoadU(d, x + w * kWord + kLanes * t));
      const auto hit = hn::AndNot(hn::Gt(key, above), hn::Gt(key, below));
      StoreBits(hn::RebindMask(d, hit), reinterpret_cast<uint8_t*>(&marks), t);
    }
    found.AppendPlaces(marks, w * kWord);
  }
  for (size_t c = 0; c < found.count; ++c) found.bits[c] = Get<uint32_t>(x, found.PlaceOf(c));
  for (size_t i = words * kWord; i < n; ++i) {
    const float value = Get<float>(x, i);
    const uint32_t key = SelectionKey(value);
    if (key >= low && key <= highest) found.Append(value, i);
  }
  return found.count;
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
