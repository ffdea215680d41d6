// SIMD operations of codecs of blocks whose code bits simd::EncodeBlocks has loops for.
#ifndef THINWIRE_COMPRESS_CODECS_SIMD_BLOCKS_H_
#define THINWIRE_COMPRESS_CODECS_SIMD_BLOCKS_H_

#include "compress/codec_info.h"
#include "compress/simd_kernels.h"

namespace thinwire::codecs {

void EncodeSimdBlocks(const Piece& piece, const float* g, float* r, uint8_t* wire);
void DecodeSimdBlocks(const Piece& piece, const uint8_t* wire, float* out);
void DecodeAddSimdBlocks(const Piece& piece, const uint8_t* wire, float* sum);
size_t ReduceSimdBlocks(const Piece& up, const Piece& down, const simd::Reduction& args);

// The loops are those of int8, int4 and onebit, told apart by their bits.
template <typename Codec>
constexpr CodecOperations SimdBlocksOf() {
  constexpr int kBits = Codec::kTraits.code_bits;
  static_assert(kBits == 8 || kBits == 4 || kBits == 1, "there is no SIMD loop for these codes");
  return {.dense = {.encode = EncodeSimdBlocks,
                    .decode = DecodeSimdBlocks,
                    .decode_add = DecodeAddSimdBlocks,
                    .reduce = ReduceSimdBlocks},
          .entries = {}};
}

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_SIMD_BLOCKS_H_
