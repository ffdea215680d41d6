// The loops over many elements, for the best instruction set of this CPU (Highway, run-time
// dispatch). fp32 in memory at any alignment, whole blocks only; cpu_backend.cc does the rest.
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
  size_t filled;                 // elements of each that are not there to fill it up
  const Draws* draws = nullptr;  // stochastic rounding of 8 or 4 bits; null: to the nearest
  const float* signs = nullptr;  // TransformSigns of 4 bits in blocks of 256; null: no transform
};

// True if ReduceBlocks has a loop from codes of `up` bits to codes of `down` bits.
constexpr bool HasReduceLoop(int up, int down) { return up == down || (up == 1 && down == 4); }

// An owner's part of a shard: x = scale * (sum over ranks in rank order) + r is encoded, its loss
// kept in r, and what it decodes to stored in out.
struct Reduction {
  std::span<const uint8_t* const> wires;  // by rank; null: `own` enters the sum there
  size_t scales_at = 0, codes_at = 0;     // of the part, in each of the wires
  const float* own;
  float scale;
  float* r;         // may be null
  float* out;       // may be `own`
  uint8_t* scales;  // of the mean, encoded; both null: it is fp32 and is not encoded
  uint8_t* codes;
};

// `r` may be null. `scales`: 2 bytes a block; `codes`: block * bits / 8 bytes a block.
void EncodeBlocks(const Blocks& blocks, const float* g, float* r, uint8_t* scales, uint8_t* codes);
void DecodeBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out);
void DecodeAddBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* sum);

// `blocks`: each rank's, and those of the mean but for their bits. To the nearest, not transformed.
void ReduceBlocks(const Blocks& blocks, int down_bits, const Reduction& args);
// bf16, and fp32 that is not encoded again. They do whole vectors, and return the elements done.
size_t ReduceBf16(const Reduction& args, size_t n);
size_t ReduceFp32(const Reduction& args, size_t n);

// x = g + r (r may be null) as bf16 into `wire`; r keeps x - bf16(x) where that is finite.
void EncodeBf16(const float* g, float* r, uint8_t* wire, size_t n);
void FromBf16(const uint8_t* in, float* out, size_t n);
// ternary's codes, of whole groups; `r` may be null.
inline constexpr size_t kTernaryGroup = 64;
void EncodeTernary(const float* g, float* r, float threshold, uint8_t* codes, size_t n);
void DecodeTernary(const uint8_t* codes, float threshold, float* out, size_t n);
void FromF16(const uint8_t* in, float* out, size_t n);
void ToF16(const float* in, uint8_t* out, size_t n);

// Magnitude keys.
struct Thresholds {
  uint32_t low;   // from here on elements are candidates; at most kHugeBits
  uint32_t sure;  // from here on r is what sending x leaves
};
// topk's pass over elements [begin, begin + n): what DGC's momentum and the residual make of g, and
// which elements may be among the largest. Candidates are appended as index, from `begin` on, and
// bits; returns how many. Up to 16 words behind the last one are overwritten. r = x, or x - bf16(x)
// of the sure ones; where x is not finite r and the velocity stay.
size_t AddAndScan(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                  const Thresholds& keys, uint32_t* index, uint32_t* bits);
// The same for keys of x in [low, highest], and nothing is changed.
size_t Scan(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
            uint32_t* index, uint32_t* bits);

// Operations of topk on the candidates of a tensor. Arrays have room for 16 words behind the last
// candidate, which may be read and overwritten.
struct RankedKey {
  uint32_t key;
  size_t below;  // keys smaller than this one
};
// The magnitude key of rank `rank` < count of these, the smallest having rank 0. `guess`: a key
// that is probably not far above it; 0: none. `spare` has room for all.
RankedKey FindKey(const uint32_t* bits, size_t count, size_t rank, uint32_t guess, uint32_t* spare);
// Within it are the candidates with a larger key, and of those with this key the ones before
// `ties_end`, which counts candidates.
struct Border {
  uint32_t key;
  size_t ties_end;
};
// Writes the places of the candidates beyond the border whose key is `low` or more; returns how
// many.
size_t FindBeyond(const Border& border, uint32_t low, const uint32_t* bits, size_t count,
                  uint32_t* places);
// Keeps the candidates within the border, in their order; returns how many.
size_t KeepWithin(const Border& border, uint32_t* index, uint32_t* bits, size_t count);
// Writes the candidates' entries. Those with keys below `sure` and a residual to store are then the
// first of the arrays, and have what sending leaves in place of their bits; returns how many.
size_t EncodeEntries(uint32_t sure, uint32_t* index, uint32_t* bits, size_t count,
                     uint8_t* entries);

void Add(float* sum, const float* x, size_t n);  // sum += x
// sum = x * factor + y, product and sum rounded one after the other; `sum` may be x or y.
void ScaledSum(const float* x, float factor, const float* y, float* sum, size_t n);
void Scale(float* x, float factor, size_t n);             // x *= factor
void CopyFinite(const float* from, float* to, size_t n);  // to = from, where that is finite

// A copy that will not be read soon. Host memory only. Stores that go past the caches read no line
// before they overwrite it, which spares a third of a copy's traffic, and evict nothing that the
// codecs need next.
void StreamCopy(float* to, const float* from, size_t count);

}  // namespace thinwire::simd

// fp32 from tensors of any dtype and alignment, in stages that stay in the first-level cache.
namespace thinwire {

// Whole blocks of any codec, unless the tensor ends.
inline constexpr size_t kStage = kMaxBlock;
// On a cache line's border, since copies of some KiB are several times slower off it.
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

// Calls visit(floats, begin, count) for one stage after the other; fp32 is visited where it lies.
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
