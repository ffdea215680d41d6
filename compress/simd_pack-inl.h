// Converts vectors of codes to packed bytes and back, in natural order, and vectors of fp32 to bf16
// and back. Included once per target.
#if defined(THINWIRE_COMPRESS_SIMD_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_PACK_INL_H_
#undef THINWIRE_COMPRESS_SIMD_PACK_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/element_math.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using I16 = hn::Repartition<int16_t, F>;
using I8 = hn::Repartition<int8_t, F>;
using U8 = hn::Repartition<uint8_t, F>;
using V = hn::Vec<F>;
inline constexpr size_t kLanes = hn::MaxLanes(F());
// Vectors of codes that fill one vector of bytes.
template <int kBits>
inline constexpr size_t kGroup = 32 / kBits;

// Rounds half to even, as the conversion on x86 does by itself. The fix-up that Highway adds for
// values out of range costs time (decision 9); codes are in range, and special blocks do not use
// this function.
HWY_INLINE hn::Vec<I> RoundToInt(V v) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<I>{_mm512_cvtps_epi32(v.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<I>{_mm256_cvtps_epi32(v.raw)};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<I>{_mm_cvtps_epi32(v.raw)};
#else
  return hn::NearestInt(v);
#endif
}

// Packing works within 128-bit blocks; this sorts the blocks' 32-bit words: word t of block j moves
// to index t * blocks + j.
HWY_INLINE hn::Vec<U> SortWords(hn::Vec<U> v) {
  if constexpr (kLanes == 4) {
    return v;
  } else {
    constexpr size_t kBlocks = kLanes / 4;
    alignas(64) int32_t index[kLanes];
    for (size_t t = 0; t < 4; ++t) {
      for (size_t j = 0; j < kBlocks; ++j) index[t * kBlocks + j] = static_cast<int32_t>(j * 4 + t);
    }
    return hn::TableLookupLanes(v, hn::SetTableIndices(U(), index));
  }
}

HWY_INLINE hn::Vec<U> ShuffleBytes(hn::Vec<U> v, const uint8_t* table16) {
  return hn::BitCast(U(),
                     hn::TableLookupBytes(hn::BitCast(U8(), v), hn::LoadDup128(U8(), table16)));
}

// Both vectors' 16-bit lanes as bytes, block by block: eight of `a`, then eight of `b`. Values must
// fit.
HWY_INLINE hn::Vec<I8> DemoteToBytes(hn::Vec<I16> a, hn::Vec<I16> b) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<I8>{_mm512_packs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<I8>{_mm256_packs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<I8>{_mm_packs_epi16(a.raw, b.raw)};
#else
  static_assert(kLanes == 4, "one block");
  const hn::Half<I8> half;
  return hn::Combine(I8(), hn::DemoteTo(half, b), hn::DemoteTo(half, a));
#endif
}

// For each pair of neighbours: the even one plus 16 times the odd one.
HWY_INLINE hn::Vec<I16> SumOfPairs(hn::Vec<I8> codes) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<I16>{_mm512_maddubs_epi16(_mm512_set1_epi16(0x1001), codes.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<I16>{_mm256_maddubs_epi16(_mm256_set1_epi16(0x1001), codes.raw)};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<I16>{_mm_maddubs_epi16(_mm_set1_epi16(0x1001), codes.raw)};
#else
  const auto pairs = hn::BitCast(I16(), codes);
  const auto even = hn::ShiftRight<8>(hn::ShiftLeft<8>(pairs));
  return hn::Add(even, hn::ShiftLeft<4>(hn::ShiftRight<8>(pairs)));
#endif
}

// Packs 4 vectors of codes that fit a byte into one vector of bytes.
HWY_INLINE hn::Vec<U> ToBytes(const hn::Vec<I>* k) {
  const auto bytes = DemoteToBytes(hn::ReorderDemote2To(I16(), k[0], k[1]),
                                   hn::ReorderDemote2To(I16(), k[2], k[3]));
  return SortWords(hn::BitCast(U(), bytes));
}

// Packs kGroup<kBits> vectors of codes into one vector of bytes, or of nibbles, the even element
// low. Codes are packed as they arrive, so that few occupy registers.
template <int kBits>
class Packer {
 public:
  HWY_INLINE Packer() {}  // NEON's compiler gives an implicit one no instruction set

  // Vector t of the group, in order; t must be a compile-time constant.
  HWY_INLINE void Add(size_t t, hn::Vec<I> codes) {
    if (t % 2 == 0) {
      codes_ = codes;
      return;
    }
    const auto two = hn::ReorderDemote2To(I16(), codes_, codes);
    if (t % 4 == 1) {
      two_ = two;
      return;
    }
    const auto four = DemoteToBytes(two_, two);  // each block has four of each vector, in turn
    if constexpr (kBits == 8) {
      all_ = four;
    } else if (t == 3) {
      sums_ = SumOfPairs(four);
    } else {
      all_ = DemoteToBytes(sums_, SumOfPairs(four));
    }
  }

  HWY_INLINE void Store(uint8_t* out) const {
    const U8 d8;
    auto bytes = hn::BitCast(d8, all_);
    if constexpr (kBits == 4) {
      // A negative even code has borrowed from the odd one. Adding 8 to both codes undoes the
      // borrow and inverts each nibble's highest bit.
      const auto eights = hn::Set(d8, 0x88);
      bytes = hn::Xor(hn::Add(bytes, eights), eights);
    }
    auto words = SortWords(hn::BitCast(U(), bytes));
    if constexpr (kBits == 4) words = SortPairs(words);
    hn::StoreU(hn::BitCast(d8, words), d8, out);
  }

 private:
  // Each sorted word of a nibble vector has two bytes from each of two vectors.
  static HWY_INLINE hn::Vec<U> SortPairs(hn::Vec<U> words) {
    alignas(16) static constexpr uint8_t kOrder8[16] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                        8, 9, 12, 13, 10, 11, 14, 15};
    alignas(16) static constexpr uint8_t kOrder16[16] = {0, 1, 4, 5, 8,  9,  12, 13,
                                                         2, 3, 6, 7, 10, 11, 14, 15};
    if constexpr (kLanes == 8) return ShuffleBytes(words, kOrder8);
    if constexpr (kLanes == 16) return ShuffleBytes(words, kOrder16);
    return words;
  }

  hn::Vec<I> codes_;
  hn::Vec<I16> two_, sums_;
  hn::Vec<I8> all_;
};

// Rounds half to even on the bits; a NaN keeps its upper half and becomes quiet. NaNs are detected
// by their bits: in Highway 1.0.3, Ne is an ordered comparison on AVX2 and AVX-512, so that x != x
// is never true.
HWY_INLINE hn::Vec<U> Bf16Bits(V x) {
  const U du;
  const auto bits = hn::BitCast(du, x);
  const auto even = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(even, hn::Set(du, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
  const auto magnitude = hn::BitCast(I(), hn::And(bits, hn::Set(du, kAbsMask)));
  const auto above_inf = hn::Gt(magnitude, hn::Set(I(), static_cast<int32_t>(kInfBits)));
  const auto nan = hn::RebindMask(du, above_inf);
  return hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
}

// Stores vector j's part of a run of bits, one bit per element.
HWY_INLINE void StoreBits(hn::Mask<F> mask, uint8_t* to, size_t j) {
  if constexpr (kLanes >= 8) {
    hn::StoreMaskBits(F(), mask, to + kLanes / 8 * j);
  } else {
    uint8_t bits[8];
    hn::StoreMaskBits(F(), mask, bits);
    to[j / 2] = static_cast<uint8_t>(j % 2 == 0 ? bits[0] : to[j / 2] | bits[0] << 4);
  }
}

// The signs of vector j as bits of a block's codes, and the inverse.
HWY_INLINE void StoreSigns(V x, uint8_t* codes, size_t j) {
  StoreBits(hn::RebindMask(F(), hn::Lt(hn::BitCast(I(), x), hn::Zero(I()))), codes, j);
}

HWY_INLINE hn::Mask<F> LoadSigns(const uint8_t* codes, size_t j) {
  if constexpr (kLanes >= 8) {
    return hn::LoadMaskBits(F(), codes + kLanes / 8 * j);
  } else {
    const uint8_t bits[8] = {static_cast<uint8_t>(codes[j / 2] >> (4 * (j % 2)) & 15)};
    return hn::LoadMaskBits(F(), bits);
  }
}

// table[index % 16] in each lane. On AVX-512 the processor ignores higher bits.
HWY_INLINE V LookUpLow4(V table, hn::Vec<U> index) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_permutexvar_ps(index.raw, table.raw)};
#else
  return hn::TableLookupLanes(table, hn::IndicesFromVec(F(), hn::And(index, hn::Set(U(), 15))));
#endif
}

// Unpacker: computes the products of codes and a scale. These are exact, so a table of them,
// indexed by nibble, gives the same bits as a multiplication.
template <int kBits>
class Unpacker {
 public:
  // Vectors that are unpacked together: their codes begin on a byte, and fill a row of the table.
  static constexpr size_t kStep = 8;

  explicit HWY_INLINE Unpacker(float scale) : scale_(hn::Set(F(), scale)) {
    if constexpr (kTable) {
      alignas(64) static constexpr float kCodes[16] = {0,  1,  2,  3,  4,  5,  6,  7,
                                                       -8, -7, -6, -5, -4, -3, -2, -1};
      table_ = hn::Mul(hn::Load(F(), kCodes), scale_);
    }
  }

  // Vector j of the kStep vectors whose codes begin at `codes`; j must be a compile-time constant.
  HWY_INLINE V Values(const uint8_t* codes, size_t j) const {
    if constexpr (kBits == 1) {
      const V negative = hn::Xor(scale_, hn::BitCast(F(), hn::Set(U(), ~kAbsMask)));
      if constexpr (kLanes != 8) return hn::IfThenElse(LoadSigns(codes, j), negative, scale_);
      // AVX2 can't make masks from bits: each lane shifts its bit to the sign position.
      uint32_t word;
      memcpy(&word, codes + sizeof(word) * (j / 4), sizeof(word));
      alignas(64) uint32_t shift[kLanes];
      for (size_t i = 0; i < kLanes; ++i) shift[i] = static_cast<uint32_t>(31 - 8 * (j % 4) - i);
      const V sign = hn::BitCast(F(), hn::Shl(hn::Set(U(), word), hn::Load(U(), shift)));
      return hn::IfNegativeThenElse(sign, negative, scale_);
    } else if constexpr (kBits == 8) {
      const hn::Rebind<int8_t, F> d8;
      const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes) + kLanes * j);
      return hn::Mul(hn::ConvertTo(F(), hn::PromoteTo(I(), bytes)), scale_);
    } else if constexpr (kTable) {
      // Words 2t and 2t + 1 of a 64-byte row feed 8 lanes each.
      alignas(64) int32_t index[kLanes];
      alignas(64) uint32_t shift[kLanes];
      for (size_t i = 0; i < kLanes; ++i) {
        index[i] = static_cast<int32_t>(2 * j + i / 8);
        shift[i] = static_cast<uint32_t>(4 * (i % 8));
      }
      const auto row = hn::LoadU(U(), reinterpret_cast<const uint32_t*>(codes));
      const auto words = hn::TableLookupLanes(row, hn::SetTableIndices(U(), index));
      return LookUpLow4(table_, hn::Shr(words, hn::Load(U(), shift)));
    } else {
      uint32_t word = 0;
      memcpy(&word, codes + kLanes / 2 * j, kLanes / 2);
      alignas(64) uint32_t shift[kLanes];
      for (size_t i = 0; i < kLanes; ++i) shift[i] = static_cast<uint32_t>(28 - 4 * i);
      const auto left = hn::BitCast(I(), hn::Shl(hn::Set(U(), word), hn::Load(U(), shift)));
      return hn::Mul(hn::ConvertTo(F(), hn::ShiftRight<28>(left)), scale_);
    }
  }

 private:
  static constexpr bool kTable = kBits == 4 && kLanes == 16;
  V scale_;
  V table_ = hn::Zero(F());
};

using Du16 = hn::Rebind<uint16_t, F>;

HWY_INLINE V LoadBf16(const uint8_t* at) {
  const auto half = hn::LoadU(Du16(), reinterpret_cast<const uint16_t*>(at));
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(U(), half)));
}

// Rounds x half to even, and returns the rounded value.
HWY_INLINE V StoreBf16(V x, uint8_t* at) {
  const auto half = Bf16Bits(x);
  // DemoteTo saturates signed values, and these are within 0..65535.
  hn::StoreU(hn::DemoteTo(Du16(), hn::BitCast(I(), half)), Du16(), reinterpret_cast<uint16_t*>(at));
  return hn::BitCast(F(), hn::ShiftLeft<16>(half));
}

// The new residual: the loss, or the old residual where the loss is not finite.
HWY_INLINE V Bf16Loss(V x, V decoded, V old) {
  const V kept = hn::Sub(x, decoded);
  const auto finite = hn::Lt(hn::Abs(kept), hn::BitCast(F(), hn::Set(U(), kInfBits)));
  return hn::IfThenElse(finite, kept, old);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_PACK_INL_H_
