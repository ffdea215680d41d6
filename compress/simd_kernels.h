// The loops over many elements, for the best instruction set of this CPU (Highway, run-time
// dispatch). fp32 in memory at any alignment, whole blocks only; cpu_backend.cc does the rest.
#ifndef THINWIRE_COMPRESS_SIMD_KERNELS_H_
#define THINWIRE_COMPRESS_SIMD_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace thinwire::simd {

// A run of whole blocks of int8 or int4. `bits` is 8 or 4, `block` a multiple of 128.
struct Blocks {
  int bits;
  size_t block;
  size_t count;
};

// `r` may be null. `scales`: 2 bytes a block; `codes`: block * bits / 8 bytes a block.
void EncodeBlocks(const Blocks& blocks, const float* g, float* r, uint8_t* scales, uint8_t* codes);
void DecodeBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out);
void DecodeAddBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* sum);

// x = (own + peer's codes) * scale + r; encodes x, keeps the loss in r (may be null), decodes to
// out.
void ReducePairBlocks(const Blocks& blocks, const float* own, const uint8_t* peer_scales,
                      const uint8_t* peer_codes, float scale, float* r, float* out, uint8_t* scales,
                      uint8_t* codes);

// x = g + r (r may be null) as bf16 into `wire`; r keeps x - bf16(x) where that is finite.
void EncodeBf16(const float* g, float* r, uint8_t* wire, size_t n);
void FromBf16(const uint8_t* in, float* out, size_t n);
void FromF16(const uint8_t* in, float* out, size_t n);
void ToF16(const float* in, uint8_t* out, size_t n);

void Add(float* sum, const float* x, size_t n);  // sum += x
void Scale(float* x, float factor, size_t n);    // x *= factor

}  // namespace thinwire::simd

#endif  // THINWIRE_COMPRESS_SIMD_KERNELS_H_
