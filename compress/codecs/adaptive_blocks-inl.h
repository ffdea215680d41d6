// adaptive's blocks: transformed, coded, decoded, several at a time. Included once for each target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCKS_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCKS_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCKS_INL_H_
#endif

#include <hwy/highway.h>

#include <span>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_codes-inl.h"
#include "compress/codecs/adaptive_heads-inl.h"
#include "compress/codecs/adaptive_transform-inl.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// +-step, with the signs of vector j.
HWY_INLINE V WithSigns(V step, const float* HWY_RESTRICT signs, size_t j) {
  return hn::CopySign(step, hn::Load(F(), signs + kLanes * j));
}

// The transform of x, in natural order; `signs` are the shard's, each a sixteenth.
HWY_NOINLINE void TransformOf(const float* HWY_RESTRICT x, const float* HWY_RESTRICT signs,
                              float inverse, Block16& block) {
  const V factor = hn::Set(F(), inverse * (1.0f / 16));
  const auto whole = [&](size_t j) HWY_ATTR {
    return RoundToInt(hn::Mul(hn::LoadU(F(), x + kLanes * j), WithSigns(factor, signs, j)));
  };
  W v[kWords];
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) v[i] = PackWords(whole(2 * i), whole(2 * i + 1));
  TransformWords<true>(v);
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) hn::Store(v[i], I16(), block.at + kWordLanes * i);
}

// Calls put(j, whole, factor) for sums of levels in packed order: the product is vector j of the
// elements. `step` is AdaptiveStep.

// Products are exact, fused or not: sums have 15 bits and heads that an encoder sends 8, and the
// factor's 2^-16, for which the sums are taken times 2^16, leaves it a normal number.
template <class Put>
HWY_INLINE void ForNarrowValues(const Block16& sums, const float* HWY_RESTRICT signs, float step,
                                Put put) {
  const V factor = hn::Set(F(), step * (1.0f / 16) * 0x1p-16f);
  for (size_t i = 0; i < kWords; ++i) {
    const W whole = hn::Load(I16(), sums.at + kWordLanes * i);
    put(2 * i, hn::ConvertTo(F(), LowerShifted(whole)), WithSigns(factor, signs, 2 * i));
    put(2 * i + 1, hn::ConvertTo(F(), UpperShifted(whole)), WithSigns(factor, signs, 2 * i + 1));
  }
}

// Products that are not exact are rounded here, and the factor is 1.
template <class Put>
HWY_INLINE void ForValues(const Parts& sums, const float* HWY_RESTRICT signs, float step, Put put) {
  const V one = hn::Set(F(), 1.0f), factor = hn::Set(F(), step * (1.0f / 16));
  const auto value = [&](hn::Vec<I> coarse, hn::Vec<I> fine, size_t j) HWY_ATTR {
    const auto whole =
        hn::Add(hn::ShiftRight<16 - codecs::kFineBits>(coarse), hn::ShiftRight<16>(fine));
    return hn::Mul(hn::ConvertTo(F(), whole), WithSigns(factor, signs, j));
  };
  for (size_t i = 0; i < kWords; ++i) {
    const W coarse = hn::Load(I16(), sums.coarse.at + kWordLanes * i);
    const W fine = hn::Load(I16(), sums.fine.at + kWordLanes * i);
    put(2 * i, value(LowerShifted(coarse), LowerShifted(fine), 2 * i), one);
    put(2 * i + 1, value(UpperShifted(coarse), UpperShifted(fine), 2 * i + 1), one);
  }
}

// A block on its way. Several go through each stage together: the stages of one block wait for each
// other, and in a stage the blocks don't.
struct Task {
  float* values;
  float* decoded;  // where a codec also wants what `values` decode to
  uint8_t* planes;
  uint16_t head;
  int width;   // 0: nothing but `values` and `head` counts
  Parts sums;  // of a narrow block only the coarse part

  // True where products of sums of levels are exact: of narrow widths, under heads of an encoder.
  bool narrow() const { return width <= kNarrowWidth && head >= kFirstHead && head <= kHugeHead; }
  float scale() const { return FloatOf(uint32_t{head} << 16); }
};
inline constexpr size_t kTasks = 4;

HWY_INLINE void SumLevels(std::span<Task> tasks) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    TransformToPacked(task.sums.coarse);
    if (!task.narrow()) TransformToPacked(task.sums.fine);
  }
}

// put(j, whole, factor) for the elements of a block that has codes.
template <class Put>
HWY_INLINE void ForElements(const Task& task, const float* HWY_RESTRICT signs, Put put) {
  const float step = AdaptiveStep(task.scale(), task.width);
  if (HWY_LIKELY(task.narrow())) {
    ForNarrowValues(task.sums.coarse, signs, step, put);
  } else {
    ForValues(task.sums, signs, step, put);
  }
}

// Calls put(j, whole, factor) for all elements, also of a block that has no codes.
template <class Put>
HWY_INLINE void ForDecoded(const Task& task, const float* HWY_RESTRICT signs, Put put) {
  if (HWY_LIKELY(task.width > 0)) return ForElements(task, signs, put);
  const bool finite = task.head < kFirstNonFiniteHead;
  const V value = hn::Set(F(), finite ? 0.0f : FloatOf(uint32_t{kNanScale} << 16));
  for (size_t j = 0; j < kBlockVectors; ++j) put(j, value, hn::Set(F(), 1.0f));
}

// Output of an encoding besides codes. kLoss: x becomes its loss. kBoth: and `decoded` is set.
enum class Leaves { kNothing, kLoss, kBoth };

template <Leaves kLeaves>
HWY_INLINE void Encode(std::span<Task> tasks, const float* HWY_RESTRICT signs) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    TransformOf(task.values, signs, AdaptiveInverse(task.scale()), task.sums.coarse);
  }
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    if (HWY_LIKELY(task.narrow())) {
      EncodeNarrow(task.width, task.sums.coarse, task.planes);
    } else {
      EncodeWide(task.width, task.sums, task.planes);
    }
  }
  if constexpr (kLeaves == Leaves::kNothing) return;
  SumLevels(tasks);
  for (const Task& task : tasks) {
    const auto put_decoded = [out = task.decoded](size_t j, V whole, V factor) HWY_ATTR {
      hn::StoreU(hn::Mul(whole, factor), F(), out + kLanes * j);
    };
    if (task.width > 0) {
      ForElements(task, signs, [&, x = task.values](size_t j, V whole, V factor) HWY_ATTR {
        float* const at = x + kLanes * j;
        hn::StoreU(hn::NegMulAdd(whole, factor, hn::LoadU(F(), at)), F(), at);
        if constexpr (kLeaves == Leaves::kBoth) put_decoded(j, whole, factor);
      });
    } else if constexpr (kLeaves == Leaves::kBoth) {
      ForDecoded(task, signs, put_decoded);
    }
  }
}

template <To kTo>
HWY_INLINE void Decode(std::span<Task> tasks, const float* HWY_RESTRICT signs) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    if (HWY_LIKELY(task.narrow())) {
      DecodeNarrow(task.width, task.planes, task.sums.coarse);
    } else {
      DecodeParts(task.width, task.planes, task.sums);
    }
  }
  SumLevels(tasks);
  for (const Task& task : tasks) {
    const auto put = [out = task.values](size_t j, V whole, V factor) HWY_ATTR {
      float* const at = out + kLanes * j;
      if constexpr (kTo == To::kSum) {
        hn::StoreU(hn::MulAdd(whole, factor, hn::LoadU(F(), at)), F(), at);
      } else if constexpr (kTo == To::kPast) {
        hn::Stream(hn::Mul(whole, factor), F(), at);
      } else {
        hn::StoreU(hn::Mul(whole, factor), F(), at);
      }
    };
    ForDecoded(task, signs, put);
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCKS_INL_H_
