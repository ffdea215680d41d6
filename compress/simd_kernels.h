// The loops over many elements, for the best instruction set of this CPU (Highway, run-time
// dispatch). fp32 at any alignment, whole blocks only; cpu_backend.cc handles everything else.
#ifndef THINWIRE_COMPRESS_SIMD_KERNELS_H_
#define THINWIRE_COMPRESS_SIMD_KERNELS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire::simd {

// A run of whole blocks of one codec. `block` is a multiple of 128.
struct Blocks {
  int bits;  // 8, 4 or 1
  size_t block;
  size_t count;
  size_t filled;                 // elements of each block that are not padding
  const Draws* draws = nullptr;  // stochastic rounding to 8 or 4 bits; null: to nearest
  const float* signs = nullptr;  // TransformSigns of 4 bits in blocks of 256; null: no transform
};

// True if ReduceBlocks has a loop from codes of `up` bits to codes of `down` bits.
constexpr bool HasReduceLoop(int up, int down) { return up == down || (up == 1 && down == 4); }

// An owner's part of a shard: x = scale * (sum over ranks in rank order) + r is encoded, its loss
// stored in r, and its decoded value in out.
struct Reduction {
  std::span<const uint8_t* const> wires;  // by rank; null: `own` is added there
  size_t scales_at = 0, codes_at = 0;     // bytes before the part in each wire
  const float* own;
  float scale;
  float* r;         // may be null
  float* out;       // may be `own`
  uint8_t* scales;  // of the encoded mean; both null: it is fp32 and not encoded
  uint8_t* codes;
};

// `r` may be null. `scales`: 2 bytes per block; `codes`: block * bits / 8 bytes per block.
void EncodeBlocks(const Blocks& blocks, const float* g, float* r, uint8_t* scales, uint8_t* codes);
void DecodeBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out);
void DecodeAddBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* sum);

// `blocks`: each rank's; the mean's differ only in their bits. Rounds to nearest, no transform.
void ReduceBlocks(const Blocks& blocks, int down_bits, const Reduction& args);
// For bf16, and for fp32 that is not encoded. Both do whole vectors and return the elements done.
size_t ReduceBf16(const Reduction& args, size_t n);
size_t ReduceFp32(const Reduction& args, size_t n);

// x = g + r (r may be null) as bf16 into `wire`; r keeps x - bf16(x) where that is finite.
void EncodeBf16(const float* g, float* r, uint8_t* wire, size_t n);
void FromBf16(const uint8_t* in, float* out, size_t n);
// ternary's codes, in whole groups; `r` may be null.
inline constexpr size_t kTernaryGroup = 64;
void EncodeTernary(const float* g, float* r, float threshold, uint8_t* codes, size_t n);
void DecodeTernary(const uint8_t* codes, float threshold, float* out, size_t n);
void FromF16(const uint8_t* in, float* out, size_t n);
void ToF16(const float* in, uint8_t* out, size_t n);

// Magnitude keys.
struct Thresholds {
  uint32_t low;   // elements from this key on are candidates; at most kHugeBits
  uint32_t sure;  // from this key on r is what sending x leaves
};
// topk's pass over elements [begin, begin + n): adds g to DGC's momentum and the residual, and
// finds the elements that may be among the largest. Appends candidates as index, from `begin` on,
// and bits; returns their number. Up to 16 words after the last one are overwritten. r = x, or x -
// bf16(x) for the sure ones; where x is not finite r and the velocity are unchanged.
size_t AddAndScan(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                  const Thresholds& keys, uint32_t* index, uint32_t* bits);
// The same for keys of x in [low, highest], without changing anything.
size_t Scan(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
            uint32_t* index, uint32_t* bits);

// Operations of topk on the candidates of a tensor. Arrays must have room for 16 words after the
// last candidate, which may be read and overwritten.
struct RankedKey {
  uint32_t key;
  size_t below;  // keys smaller than this one
};
// The magnitude key of rank `rank` < count; the smallest has rank 0. `guess`: a key that is
// probably not far above it; 0: none. `spare` has room for all keys.
RankedKey FindKey(const uint32_t* bits, size_t count, size_t rank, uint32_t guess, uint32_t* spare);
// The candidates within the border are those with a larger key, and those with an equal key and an
// index in the arrays below `ties_end`.
struct Border {
  uint32_t key;
  size_t ties_end;
};
// Writes the indices of the candidates beyond the border whose key is at least `low`; returns their
// number.
size_t FindBeyond(const Border& border, uint32_t low, const uint32_t* bits, size_t count,
                  uint32_t* places);
// Keeps the candidates within the border, in order; returns their number.
size_t KeepWithin(const Border& border, uint32_t* index, uint32_t* bits, size_t count);
// Writes the candidates' entries. Then moves those with keys below `sure` and a residual to store
// to the front of the arrays, with what sending leaves in place of their bits; returns their
// number.
size_t EncodeEntries(uint32_t sure, uint32_t* index, uint32_t* bits, size_t count,
                     uint8_t* entries);

void Add(float* sum, const float* x, size_t n);  // sum += x
// sum = x * factor + y, product and sum each rounded; `sum` may be x or y.
void ScaledSum(const float* x, float factor, const float* y, float* sum, size_t n);
void Scale(float* x, float factor, size_t n);             // x *= factor
void CopyFinite(const float* from, float* to, size_t n);  // to = from, where that is finite

// A copy of data that will not be read soon. Host memory only. Stores that bypass the caches read
// no line before they overwrite it, which saves a third of a copy's traffic, and evict nothing that
// the codecs need next.
void StreamCopy(float* to, const float* from, size_t count);

}  // namespace thinwire::simd

// Converts tensors of any dtype and alignment to fp32, in stages that fit in the first-level cache.
namespace thinwire {

// A whole number of blocks of any codec, except at the tensor's end.
inline constexpr size_t kStage = kMaxBlock;
// Aligned to a cache line, since unaligned copies of some KiB are several times slower.
struct alignas(64) StageBuffer : std::array<float, kStage> {};

inline float* Floats(const TensorView& view) { return static_cast<float*>(view.data); }

inline void ToFloats(const TensorView& view, float* out) {
  const auto* in = static_cast<const uint8_t*>(view.data);
  switch (view.dtype) {
    case DType::kF32: std::memcpy(out, in, view.bytes()); return;
    case DType::kBF16: return simd::FromBf16(in, out, view.numel);
    case DType::kF16: return simd::FromF16(in, out, view.numel);
  }
}

inline void FromFloats(const float* in, const TensorView& view) {
  auto* out = static_cast<uint8_t*>(view.data);
  switch (view.dtype) {
    case DType::kF32: std::memcpy(out, in, view.bytes()); return;
    case DType::kBF16: return simd::EncodeBf16(in, nullptr, out, view.numel);
    case DType::kF16: return simd::ToF16(in, out, view.numel);
  }
}

// Calls visit(floats, begin, count) for each stage in turn; fp32 is visited in place.
template <typename Visit>
void ForEachStage(const TensorView& view, Visit visit) {
  StageBuffer values;
  for (size_t begin = 0; begin < view.numel; begin += kStage) {
    const TensorView part = view.Slice(begin, std::min(kStage, view.numel - begin));
    const bool direct = part.dtype == DType::kF32;
    if (!direct) ToFloats(part, values.data());
    visit(direct ? Floats(part) : values.data(), begin, part.numel);
  }
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_SIMD_KERNELS_H_
