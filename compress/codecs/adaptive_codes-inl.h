// adaptive's codes: the bit planes of a block from its transformed numbers, and back. Included once
// for each target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_CODES_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/adaptive_tables.h"
#include "compress/codecs/adaptive_transform-inl.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using I8 = hn::Repartition<int8_t, F>;
inline constexpr size_t kByteLanes = hn::MaxLanes(U8());

// Narrow widths: the levels of a block fit in bytes, and their sums in 16 bits.

// From transformed numbers to their codes, and the codes' levels in their place. Natural order.
HWY_NOINLINE void EncodeNarrow(int width, Block16& block, uint8_t* HWY_RESTRICT planes) {
  const codecs::NarrowTable& table = codecs::kNarrowTables[width - 1];
  const auto levels = hn::LoadDup128(U8(), table.level);
  for (size_t i = 0; i < kWords; ++i, planes += kWordLanes / 8) {
    const W value = hn::Load(I16(), block.at + kWordLanes * i);
    const auto negative = hn::Lt(value, hn::Zero(I16()));
    hn::StoreMaskBits(I16(), negative, planes);
    const W magnitude = hn::Abs(value);
    // The bytes of a key look up those of a border: the lower one at key, the upper one behind it.
    W key = hn::Set(I16(), 0x0100), bit = hn::Set(I16(), 0x0808);
    for (int step = 0; step + 1 < width; ++step) {
      const W border = hn::TableLookupBytes(hn::LoadDup128(I16(), table.border[step]), key);
      const auto above = hn::Gt(magnitude, border);
      hn::StoreMaskBits(I16(), above, planes + (step + 1) * kPlaneBytes);
      key = hn::Add(key, hn::IfThenElseZero(above, bit));
      bit = hn::ShiftRight<1>(bit);
    }
    // An upper byte of 0x80 and more is looked up as 0.
    const auto bytes = hn::BitCast(U8(), hn::Or(key, hn::Set(I16(), INT16_MIN)));
    const W level = hn::BitCast(I16(), hn::TableLookupBytesOr0(levels, bytes));
    hn::Store(hn::IfThenElse(negative, hn::Neg(level), level), I16(), block.at + kWordLanes * i);
  }
}

// From codes to levels, in natural order.
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

// Wide ones are rare, and are looked up element by element: levels in two parts, so that the sums
// of both stay within 16 bits.
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

// From transformed numbers, the coarse part, to their codes, and the codes' levels in their place.
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
