// adaptive's transform, and its codes: the bit planes of a block from its transformed numbers, and
// back. Included once per target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_tables.h"
#include "compress/element_math.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The transform works on blocks of 16-bit integers. Their sums are exact, so their order does not
// matter.

// A block has two orders. In `natural` order number i is element i. In `packed` order vector i is
// the result of packing two vectors of 32 bits: within each 128 bits four numbers of vector 2i,
// then four of vector 2i + 1. The transform also converts a block from one order to the other, so
// that neither packing nor unpacking has to sort.
using W = hn::Vec<I16>;
inline constexpr size_t kWordLanes = hn::MaxLanes(I16());
inline constexpr size_t kWords = kTransform / kWordLanes;
struct alignas(64) Block16 {
  int16_t at[kTransform];
};

// Vector i of a packed block, from vectors 2i and 2i + 1.
HWY_INLINE W PackWords(hn::Vec<I> a, hn::Vec<I> b) { return hn::ReorderDemote2To(I16(), a, b); }

// The inverse, times 2^16.
HWY_INLINE hn::Vec<I> LowerShifted(W packed) {
  return hn::BitCast(I(), hn::InterleaveLower(I16(), hn::Zero(I16()), packed));
}
HWY_INLINE hn::Vec<I> UpperShifted(W packed) {
  return hn::BitCast(I(), hn::InterleaveUpper(I16(), hn::Zero(I16()), packed));
}

// Sum and difference: the butterflies of the index bit in which the two vectors differ.
HWY_INLINE void Cross(W& a, W& b) {
  const W sum = hn::Add(a, b), difference = hn::Sub(a, b);
  a = sum;
  b = difference;
}

// The functions below exchange the index bit that distinguishes a from b for a bit within the
// vectors.

// Rotates that bit and the lowest three bits by one place.
HWY_INLINE void Rotate(W& a, W& b) {
  const W low = hn::InterleaveLower(I16(), a, b), high = hn::InterleaveUpper(I16(), a, b);
  a = low;
  b = high;
}

// The bit that distinguishes halves of 512 bits.
HWY_INLINE void ExchangeHalves(W& a, W& b) {
  const W low = hn::ConcatLowerLower(I16(), b, a), high = hn::ConcatUpperUpper(I16(), b, a);
  a = low;
  b = high;
}

// The bit that distinguishes neighbouring blocks of 128 bits.
HWY_INLINE void ExchangeBlocks(W& a, W& b) {
  if constexpr (kWordLanes == 16) return ExchangeHalves(a, b);
  const W low = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
  b = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
  a = low;
}

// Pairs that are interleaved: a stage of one pair must wait for the stage before it.
inline constexpr size_t kPairs = 4;

// Applies a stage to pairs v[i], v[i + kWords / 2].
template <void (*kStage)(W&, W&)>
HWY_INLINE void ForPairs(W* v) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kPairs; ++i) kStage(v[i], v[i + kWords / 2]);
}

// The butterflies of all bits within the vectors, and of the one between them. The order of the two
// exchanges decides where the bits end up.
template <bool kToNatural>
HWY_INLINE void CrossWithin(W* v) {
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  if constexpr (kWordLanes >= 32 && kToNatural) {
    ForPairs<ExchangeHalves>(v);
    ForPairs<Cross>(v);
  }
  if constexpr (kWordLanes >= 16) {
    ForPairs<ExchangeBlocks>(v);
    ForPairs<Cross>(v);
  }
  if constexpr (kWordLanes >= 32 && !kToNatural) {
    ForPairs<ExchangeHalves>(v);
    ForPairs<Cross>(v);
  }
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
}

// The unscaled Walsh-Hadamard transform, from packed to natural order or from natural to packed.
template <bool kToNatural>
HWY_INLINE void TransformWords(W (&v)[kWords]) {
#pragma GCC unroll 16
  for (size_t stride = 1; stride < kWords / 2; stride *= 2) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kWords; ++i) {
      if ((i & stride) == 0) Cross(v[i], v[i + stride]);
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < kWords / 2; i += kPairs) CrossWithin<kToNatural>(v + i);
}

HWY_NOINLINE void TransformToPacked(Block16& block) {
  W v[kWords];
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) v[i] = hn::Load(I16(), block.at + kWordLanes * i);
  TransformWords<false>(v);
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) hn::Store(v[i], I16(), block.at + kWordLanes * i);
}

// Codes.

using I8 = hn::Repartition<int8_t, F>;
inline constexpr size_t kByteLanes = hn::MaxLanes(U8());

// Narrow widths: the levels of a block fit in bytes, and their sums in 16 bits.

// Converts transformed numbers to codes, and replaces them by the codes' levels. Natural order.
HWY_NOINLINE void EncodeNarrow(int width, Block16& block, uint8_t* HWY_RESTRICT planes) {
  const codecs::NarrowTable& table = codecs::kNarrowTables[width - 1];
  const auto levels = hn::LoadDup128(U8(), table.level);
  for (size_t i = 0; i < kWords; ++i, planes += kWordLanes / 8) {
    const W value = hn::Load(I16(), block.at + kWordLanes * i);
    const auto negative = hn::Lt(value, hn::Zero(I16()));
    hn::StoreMaskBits(I16(), negative, planes);
    const W magnitude = hn::Abs(value);
    // The two bytes of a key look up the two bytes of a border: the lower one at key, the upper one
    // next.
    W key = hn::Set(I16(), 0x0100), bit = hn::Set(I16(), 0x0808);
    for (int step = 0; step + 1 < width; ++step) {
      const W border = hn::TableLookupBytes(hn::LoadDup128(I16(), table.border[step]), key);
      const auto above = hn::Gt(magnitude, border);
      hn::StoreMaskBits(I16(), above, planes + (step + 1) * kPlaneBytes);
      key = hn::Add(key, hn::IfThenElseZero(above, bit));
      bit = hn::ShiftRight<1>(bit);
    }
    // An upper byte of at least 0x80 is looked up as 0.
    const auto bytes = hn::BitCast(U8(), hn::Or(key, hn::Set(I16(), INT16_MIN)));
    const W level = hn::BitCast(I16(), hn::TableLookupBytesOr0(levels, bytes));
    hn::Store(hn::IfThenElse(negative, hn::Neg(level), level), I16(), block.at + kWordLanes * i);
  }
}

// Converts codes to levels, in natural order.
HWY_NOINLINE void DecodeNarrow(int width, const uint8_t* HWY_RESTRICT planes, Block16& block) {
  const hn::Half<I8> half;
  const auto levels = hn::LoadDup128(U8(), codecs::kNarrowTables[width - 1].level);
  for (size_t i = 0; i < kTransform; i += kByteLanes, planes += kByteLanes / 8) {
    const auto negative = hn::LoadMaskBits(I8(), planes);
    auto key = hn::Zero(U8());
    for (int plane = 1; plane < width; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(16 >> plane));
      const auto is = hn::LoadMaskBits(U8(), planes + plane * kPlaneBytes);
      key = hn::Or(key, hn::IfThenElseZero(is, bit));
    }
    const auto level = hn::BitCast(I8(), hn::TableLookupBytes(levels, key));
    const auto value = hn::IfThenElse(negative, hn::Neg(level), level);
    hn::Store(hn::PromoteTo(I16(), hn::LowerHalf(half, value)), I16(), block.at + i);
    hn::Store(hn::PromoteTo(I16(), hn::UpperHalf(half, value)), I16(),
              block.at + i + kByteLanes / 2);
  }
}

// Wide codes are rare, and are looked up one by one: their levels have two parts, so that the sums
// of both fit in 16 bits.
struct Parts {
  Block16 coarse, fine;
};
struct alignas(64) Codes8 {
  uint8_t at[kTransform];  // the sign above the index
};

HWY_INLINE void LevelsOfCodes(int width, const Codes8& codes, Parts& parts) {
  const codecs::SplitLevels& levels = codecs::kSplitLevels[width - 1];
  for (size_t i = 0; i < kTransform; ++i) parts.coarse.at[i] = levels.at[codes.at[i]];
  for (size_t i = 0; i < kTransform; i += kWordLanes) {
    const W both = hn::Load(I16(), parts.coarse.at + i);
    hn::Store(hn::ShiftRight<8>(both), I16(), parts.coarse.at + i);
    hn::Store(hn::ShiftRight<8>(hn::ShiftLeft<8>(both)), I16(), parts.fine.at + i);
  }
}

// Converts transformed numbers (the coarse part) to codes, and replaces them by the codes' levels.
HWY_NOINLINE void EncodeWide(int width, Parts& parts, uint8_t* HWY_RESTRICT planes) {
  const codecs::WideTable& table = codecs::kWideTables[width - kNarrowWidth - 1];
  Codes8 codes;
  for (size_t i = 0; i < kTransform; ++i) {
    const int value = parts.coarse.at[i];
    const uint8_t index = table.IndexOf(value < 0 ? -value : value);
    codes.at[i] = static_cast<uint8_t>(index | (value < 0) << (width - 1));
  }
  for (size_t i = 0; i < kTransform; i += kByteLanes) {
    const auto code = hn::Load(U8(), codes.at + i);
    for (int plane = 0; plane < width; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(1 << (width - 1 - plane)));
      hn::StoreMaskBits(U8(), hn::TestBit(code, bit), planes + plane * kPlaneBytes + i / 8);
    }
  }
  LevelsOfCodes(width, codes, parts);
}

// Decodes a block whose codes have `width` bits, 1 to 8; slower than the loops above.
HWY_NOINLINE void DecodeParts(int width, const uint8_t* HWY_RESTRICT planes, Parts& parts) {
  Codes8 codes;
  for (size_t i = 0; i < kTransform; i += kByteLanes) {
    auto code = hn::Zero(U8());
    for (int plane = 0; plane < width; ++plane) {
      const auto bit = hn::Set(U8(), static_cast<uint8_t>(1 << (width - 1 - plane)));
      const auto is = hn::LoadMaskBits(U8(), planes + plane * kPlaneBytes + i / 8);
      code = hn::Or(code, hn::IfThenElseZero(is, bit));
    }
    hn::Store(code, U8(), codes.at + i);
  }
  LevelsOfCodes(width, codes, parts);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
