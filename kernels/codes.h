// Codes of a quad, packed and unpacked, and where they lie in the wire bytes.
#ifndef THINWIRE_KERNELS_CODES_H_
#define THINWIRE_KERNELS_CODES_H_

#include "compress/codec_list.h"
#include "compress/half_float.h"
#include "kernels/exact_float.h"
#include "kernels/tile.h"
#include "kernels/word.h"

namespace thinwire::kernels {

// What is fixed for a codec, for the compiler.
template <CodecId kId, bool kWithTransform = false>
struct CodecTraits {
  static constexpr CodecId kCodec = kId;
  static constexpr bool kHadamard = kWithTransform;
  static constexpr bool kElements = InfoOf(kId).kind == CodecKind::kElements;
  static constexpr bool kOneBit = kId == CodecId::kOneBit;
  static constexpr int kBits = InfoOf(kId).code_bits;
  static constexpr int kQmax = InfoOf(kId).qmax;
  static constexpr unsigned kQuadBytes = kBits * kQuad / 8;  // 0 for onebit: half a byte
};

// Codes as one integer, the first element lowest.
template <int kBits>
THINWIRE_HD uint32_t PackQuad(const int* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t word = 0;
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) {
    word |= (static_cast<uint32_t>(codes[i]) & kMask) << (i * kBits);
  }
  return word;
}

// Code i of a word, sign extended.
template <int kBits>
THINWIRE_HD int CodeAt(uint32_t word, unsigned i) {
  return static_cast<int>(word << (32 - kBits - i * kBits)) >> (32 - kBits);
}

// The values of a quad of a shard, without the transform. `scale` is that of its block; codecs of
// elements have none.
template <typename Traits>
THINWIRE_HD void DecodeQuad(const uint8_t* codes, size_t place, float scale, float* out) {
  if constexpr (Traits::kCodec == CodecId::kFp32) {
    CopyWord<16>(out, codes + place * 4);
  } else if constexpr (Traits::kCodec == CodecId::kBf16) {
    alignas(8) uint16_t halves[kQuad];
    CopyWord<8>(halves, codes + place * 2);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) out[i] = FromBf16(halves[i]);
  } else if constexpr (Traits::kOneBit) {
    const unsigned bits = codes[place / 8] >> (place % 8);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) out[i] = Mul(bits >> i & 1 ? -1.0f : 1.0f, scale);
  } else {
    alignas(4) uint32_t word = 0;
    CopyWord<Traits::kQuadBytes>(&word, codes + place * Traits::kBits / 8);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      out[i] = Mul(static_cast<float>(CodeAt<Traits::kBits>(word, i)), scale);
    }
  }
}

// Calls visit(CodecTraits) for a codec that is known at run time only.
template <typename Visit>
THINWIRE_HD void WithTraits(CodecId id, bool hadamard, Visit visit) {
  switch (id) {
    case CodecId::kFp32: return visit(CodecTraits<CodecId::kFp32>());
    case CodecId::kBf16: return visit(CodecTraits<CodecId::kBf16>());
    case CodecId::kInt8: return visit(CodecTraits<CodecId::kInt8>());
    case CodecId::kInt4:
      return hadamard ? visit(CodecTraits<CodecId::kInt4, true>())
                      : visit(CodecTraits<CodecId::kInt4>());
    case CodecId::kOneBit: return visit(CodecTraits<CodecId::kOneBit>());
    case CodecId::kTopK: return;  // entries, not codes: there is no kernel for it
  }
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_CODES_H_
