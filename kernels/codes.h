// Packs and unpacks the codes of a quad, and locates them in the wire bytes.
#ifndef THINWIRE_KERNELS_CODES_H_
#define THINWIRE_KERNELS_CODES_H_

#include "compress/codec_list.h"
#include "compress/element_math.h"
#include "kernels/exact_float.h"
#include "kernels/tile.h"
#include "kernels/word.h"

namespace thinwire::kernels {

// A codec as a kernel is compiled for it: its type from compress/codecs/, and whether it
// transforms.
template <typename CodecType, bool kWithTransform = false>
struct Variant {
  using Codec = CodecType;
  static constexpr bool kHadamard = kWithTransform;
  static constexpr bool kElements = Codec::kTraits.kind == CodecKind::kElements;
  static constexpr int kBits = Codec::kTraits.code_bits;
  static constexpr bool kSigns = kBits == 1;                 // a quad is half a byte
  static constexpr unsigned kQuadBytes = kBits * kQuad / 8;  // 0 for signs
};

// Adding this float to one below 2^22 rounds it half to even: the sum's low bits are the integer,
// and subtracting this float gives the integer as a float. Two additions, and no conversion.
inline constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// Packs the low bits of codes into one integer, the first element lowest.
template <int kBits>
THINWIRE_HD uint32_t PackQuad(const uint32_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t word = 0;
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) word |= (codes[i] & kMask) << (i * kBits);
  return word;
}

// Code i of a word, sign extended.
template <int kBits>
THINWIRE_HD int CodeAt(uint32_t word, unsigned i) {
  return static_cast<int>(word << (32 - kBits - i * kBits)) >> (32 - kBits);
}

// How sums treat NaNs: exactly to the bit, or as a NaN with any bits, which needs no checks.
enum class Nans : uint8_t { kExact, kAny };

// Multiplies finite values, whose products with a finite scale are never NaN.
template <Nans kNans = Nans::kExact>
THINWIRE_HD void ScaleQuad(float scale, float* values) {
  if (kNans == Nans::kAny || IsFinite(scale)) {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) values[i] = values[i] * scale;
  } else {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) values[i] = Mul(values[i], scale);
  }
}

// The bytes of the codes of this many elements.
template <typename Traits, typename Place>
THINWIRE_HD Place CodeBytes(Place elements) {
  if constexpr (Traits::kBits >= 8) {
    return elements * (Traits::kBits / 8);
  } else {
    return elements / (8 / Traits::kBits);
  }
}

// The values of a quad, without the transform. load.template operator()<kBytes>(to) copies its
// codes; for signs, the byte that two quads share. `place`: of its first element, in the tile or in
// the shard. `scale` is that of its block; codecs of elements have none.
template <typename Traits, Nans kNans, typename Load>
THINWIRE_HD void DecodeQuad(Load load, unsigned place, float scale, float* out) {
  if constexpr (Traits::kElements) {
    using Code = typename Traits::Codec::Code;
    alignas(kQuad * sizeof(Code)) Code quad[kQuad];
    load.template operator()<sizeof(quad)>(quad);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) out[i] = Traits::Codec::ValueOf(quad[i]);
  } else if constexpr (Traits::kSigns) {
    uint8_t byte;
    load.template operator()<1>(&byte);
    const unsigned bits = byte >> (place % 8);
    // Both ways give the same bits. Exact reductions need one register less with the product.
    const bool is_product = kNans == Nans::kExact && IsFinite(scale);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      const uint32_t sign = bits << (31 - i) & ~kAbsMask;
      out[i] = FloatOf(sign ^ BitsOf(is_product ? 1.0f : scale));
    }
    if (is_product) ScaleQuad<Nans::kAny>(scale, out);
  } else {
    alignas(4) uint32_t word = 0;
    load.template operator()<Traits::kQuadBytes>(&word);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      out[i] = static_cast<float>(CodeAt<Traits::kBits>(word, i));
    }
    ScaleQuad<kNans>(scale, out);
  }
}

// True if a codec supports hadamard=1.
template <typename Codec>
inline constexpr bool kTransforms = [] {
  if constexpr (Codec::kTraits.kind == CodecKind::kBlocks) {
    return Codec::kTransforms;
  } else {
    return false;
  }
}();

// True for codecs whose tiles are encoded and decoded independently, by tiles.h. Codecs of entries
// and of widths have kernels of their own.
template <typename Codec>
inline constexpr bool kInTiles =
    Codec::kTraits.has_kernels && !Codec::kTraits.entries() && !Codec::kTraits.widths();

template <typename... Codecs>
constexpr bool AnyInTiles(CodecTypes<Codecs...>) {
  return (kInTiles<Codecs> || ...);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CODES_H_
