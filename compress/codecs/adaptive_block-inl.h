// One block of adaptive: the transform in whole numbers, codes to bit planes and back. All sums are
// exact, so that their order is free. Included once for each target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCK_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCK_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCK_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_borders.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A block of 16-bit whole numbers.
using W = hn::Vec<I16>;
using I8 = hn::Repartition<int8_t, F>;
inline constexpr size_t kWordLanes = hn::MaxLanes(I16());
inline constexpr size_t kWords = kTransform / kWordLanes;
struct alignas(64) Block16 {
  int16_t at[kTransform];
};

// Sum and difference, a bit of the index that tells two vectors apart.
HWY_INLINE void Cross(W& a, W& b) {
  const W sum = hn::Add(a, b), difference = hn::Sub(a, b);
  a = sum;
  b = difference;
}

// A bit that tells the blocks of 128 bits of a vector apart.
HWY_INLINE W CrossAdjacentBlocks(W v) {
  const W other = hn::SwapAdjacentBlocks(v);
  return hn::OddEvenBlocks(hn::Sub(other, v), hn::Add(v, other));
}

// Four bits: the one that tells a from b, and the three of a block of 128 bits. Interleaving turns
// the four around by one, so that after four times each has had its turn and is back.
HWY_INLINE void CrossWithin(W& a, W& b) {
#pragma GCC unroll 4
  for (int turn = 0; turn < 4; ++turn) {
    Cross(a, b);
    const W low = hn::InterleaveLower(I16(), a, b), high = hn::InterleaveUpper(I16(), a, b);
    a = low;
    b = high;
  }
}

// The unscaled Walsh-Hadamard transform, which is its own inverse but for a factor of 256.
HWY_INLINE void TransformWords(W (&v)[kWords]) {
#pragma GCC unroll 16
  for (size_t stride = 1; stride < kWords / 2; stride *= 2) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kWords; ++i) {
      if ((i & stride) == 0) Cross(v[i], v[i + stride]);
    }
  }
  if constexpr (kWordLanes >= 32) {  // halves change places with neighbours, and back
#pragma GCC unroll 32
    for (size_t i = 0; i < kWords; i += 2) {
      W low = hn::ConcatLowerLower(I16(), v[i + 1], v[i]);
      W high = hn::ConcatUpperUpper(I16(), v[i + 1], v[i]);
      Cross(low, high);
      v[i] = hn::ConcatLowerLower(I16(), high, low);
      v[i + 1] = hn::ConcatUpperUpper(I16(), high, low);
    }
  }
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) {
    if constexpr (kWordLanes >= 16) v[i] = CrossAdjacentBlocks(v[i]);
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < kWords / 2; ++i) CrossWithin(v[i], v[i + kWords / 2]);
}

// Elements of two vectors, in their order: packing works within blocks of 128 bits.
HWY_INLINE W PackWords(hn::Vec<I> a, hn::Vec<I> b) {
  const auto packed = hn::ReorderDemote2To(I16(), a, b);
  if constexpr (kLanes == 4) return packed;
  alignas(64) int32_t index[kLanes];
  for (size_t i = 0; i < kLanes; ++i) {
    const size_t upper = i / (kLanes / 2), pair = i % (kLanes / 2) / 2;
    index[i] = static_cast<int32_t>(4 * pair + 2 * upper + i % 2);
  }
  const auto words = hn::BitCast(U(), packed);
  return hn::BitCast(I16(), hn::TableLookupLanes(words, hn::SetTableIndices(U(), index)));
}

HWY_INLINE void LoadWords(const Block16& from, W (&v)[kWords]) {
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) v[i] = hn::Load(I16(), from.at + kWordLanes * i);
}
HWY_INLINE void StoreWords(const W (&v)[kWords], Block16& to) {
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) hn::Store(v[i], I16(), to.at + kWordLanes * i);
}
HWY_INLINE void TransformBlock(Block16& block) {
  W v[kWords];
  LoadWords(block, v);
  TransformWords(v);
  StoreWords(v, block);
}

// What a block's codes stand for: their sums, of which those of wide codes have a coarse and a fine
// part, so that both stay within 16 bits.
inline constexpr int kFineBits = 4;
struct Sums {
  Block16 coarse, fine;
  bool wide;

  // Vector j of the block's elements; `factors` are the signs, `step` AdaptiveStep.
  HWY_INLINE V Values(size_t j, const float* HWY_RESTRICT factors, V step) const {
    const hn::Rebind<int16_t, F> words;
    auto whole = hn::PromoteTo(I(), hn::Load(words, coarse.at + kLanes * j));
    if (wide) {
      const auto low = hn::PromoteTo(I(), hn::Load(words, fine.at + kLanes * j));
      whole = hn::Add(hn::ShiftLeft<kFineBits>(whole), low);
    }
    const V factor = hn::Mul(hn::Load(F(), factors + kLanes * j), step);
    return hn::Mul(hn::ConvertTo(F(), whole), factor);
  }
};

// Bytes, for narrow codes: levels by index, as shuffles take them.
template <int kWidth>
struct NarrowTable {
  alignas(16) uint8_t level[16] = {};
  constexpr NarrowTable() {
    for (size_t i = 0; i < codecs::kLevelCount<kWidth>; ++i) {
      level[i] = static_cast<uint8_t>(codecs::LevelAt<kWidth>(i));
    }
  }
};
template <int kWidth>
inline constexpr NarrowTable<kWidth> kNarrowTable{};

// The magnitude's index, and its level, one vector at a time.
template <int kWidth>
HWY_INLINE W NarrowLevels(W magnitude, uint8_t* HWY_RESTRICT planes) {
  constexpr size_t kLevels = codecs::kLevelCount<kWidth>;
  constexpr int kFirst = codecs::LevelAt<kWidth>(0);
  if constexpr (kWidth == 1) return hn::Set(I16(), kFirst);
  if constexpr (kWidth == 2) {
    const auto large = hn::Gt(magnitude, hn::Set(I16(), codecs::kBorders<2>[0]));
    hn::StoreMaskBits(I16(), large, planes);
    return hn::IfThenElse(large, hn::Set(I16(), codecs::LevelAt<2>(1)), hn::Set(I16(), kFirst));
  }
  W index = hn::Zero(I16());
#pragma GCC unroll 16
  for (size_t j = 0; j + 1 < kLevels; ++j) {
    const auto passed = hn::Gt(magnitude, hn::Set(I16(), codecs::kBorders<kWidth>[j]));
    index = hn::Sub(index, hn::VecFromMask(I16(), passed));
  }
#pragma GCC unroll 4
  for (int plane = 0; plane < kWidth - 1; ++plane) {
    const auto bit = hn::Set(I16(), static_cast<int16_t>(1 << (kWidth - 2 - plane)));
    hn::StoreMaskBits(I16(), hn::TestBit(index, bit), planes + plane * kPlaneBytes);
  }
  // An upper byte of 0x80 is looked up as 0.
  const auto table = hn::LoadDup128(U8(), kNarrowTable<kWidth>.level);
  const auto bytes = hn::BitCast(U8(), hn::Or(index, hn::Set(I16(), INT16_MIN)));
  return hn::BitCast(I16(), hn::TableLookupBytesOr0(table, bytes));
}

// From the transformed block to its codes, and their levels in its place.
template <int kWidth>
HWY_INLINE void EncodeNarrow(W (&v)[kWords], uint8_t* HWY_RESTRICT planes) {
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) {
    const auto negative = hn::Lt(v[i], hn::Zero(I16()));
    uint8_t* const at = planes + kWordLanes / 8 * i;
    hn::StoreMaskBits(I16(), negative, at);
    const W level = NarrowLevels<kWidth>(hn::Abs(v[i]), at + kPlaneBytes);
    v[i] = hn::IfThenElse(negative, hn::Neg(level), level);
  }
}

template <int kWidth>
HWY_INLINE void DecodeNarrow(const uint8_t* HWY_RESTRICT planes, W (&v)[kWords]) {
  constexpr size_t kBytes = 2 * kWordLanes;
  const hn::Half<I8> half;
#pragma GCC unroll 16
  for (size_t i = 0; i < kTransform / kBytes; ++i) {
    const uint8_t* const at = planes + kBytes / 8 * i;
    const auto negative = hn::LoadMaskBits(I8(), at);
    auto index = hn::Zero(U8());
#pragma GCC unroll 4
    for (int plane = 1; plane < kWidth; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(1 << (kWidth - 1 - plane)));
      const auto is = hn::LoadMaskBits(U8(), at + plane * kPlaneBytes);
      index = hn::Or(index, hn::IfThenElseZero(is, bit));
    }
    const auto table = hn::LoadDup128(U8(), kNarrowTable<kWidth>.level);
    const auto level = hn::BitCast(I8(), hn::TableLookupBytes(table, index));
    const auto value = hn::IfThenElse(negative, hn::Neg(level), level);
    v[2 * i] = hn::PromoteTo(I16(), hn::LowerHalf(half, value));
    v[2 * i + 1] = hn::PromoteTo(I16(), hn::UpperHalf(half, value));
  }
}

// Wide codes are rare: element by element.
struct alignas(64) Codes8 {
  uint8_t at[kTransform];  // the sign above the index
};

template <int kWidth>
HWY_INLINE void LevelsOfWide(const Codes8& codes, Sums& sums) {
  constexpr uint8_t kSign = 1 << (kWidth - 1);
  for (size_t i = 0; i < kTransform; ++i) {
    const int level = codecs::LevelAt<kWidth>(codes.at[i] % kSign);
    const int sign = codes.at[i] >= kSign ? -1 : 1;
    sums.coarse.at[i] = static_cast<int16_t>(sign * (level >> kFineBits));
    sums.fine.at[i] = static_cast<int16_t>(sign * (level % (1 << kFineBits)));
  }
}

template <int kWidth>
HWY_NOINLINE void EncodeWide(const Block16& whole, uint8_t* HWY_RESTRICT planes, Sums& sums) {
  Codes8 codes;
  for (size_t i = 0; i < kTransform; ++i) {
    const int value = whole.at[i];
    const uint8_t index = codecs::IndexOf<kWidth>(value < 0 ? -value : value);
    codes.at[i] = static_cast<uint8_t>(index | (value < 0) << (kWidth - 1));
  }
  constexpr size_t kBytes = 2 * kWordLanes;
  for (size_t i = 0; i < kTransform / kBytes; ++i) {
    const auto code = hn::Load(U8(), codes.at + kBytes * i);
    for (int plane = 0; plane < kWidth; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(1 << (kWidth - 1 - plane)));
      hn::StoreMaskBits(U8(), hn::TestBit(code, bit),
                        planes + plane * kPlaneBytes + kBytes / 8 * i);
    }
  }
  LevelsOfWide<kWidth>(codes, sums);
}

template <int kWidth>
HWY_NOINLINE void DecodeWide(const uint8_t* HWY_RESTRICT planes, Sums& sums) {
  constexpr size_t kBytes = 2 * kWordLanes;
  Codes8 codes;
  for (size_t i = 0; i < kTransform / kBytes; ++i) {
    auto code = hn::Zero(U8());
    for (int plane = 0; plane < kWidth; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(1 << (kWidth - 1 - plane)));
      const auto is = hn::LoadMaskBits(U8(), planes + plane * kPlaneBytes + kBytes / 8 * i);
      code = hn::Or(code, hn::IfThenElseZero(is, bit));
    }
    hn::Store(code, U8(), codes.at + kBytes * i);
  }
  LevelsOfWide<kWidth>(codes, sums);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_BLOCK_INL_H_
