// fp32 from tensors of any dtype and alignment, in stages that stay in the first-level cache.
#ifndef THINWIRE_COMPRESS_STAGES_H_
#define THINWIRE_COMPRESS_STAGES_H_

#include <algorithm>
#include <array>
#include <cstring>

#include "compress/codec_traits.h"
#include "compress/simd_kernels.h"
#include "compress/types.h"

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

#endif  // THINWIRE_COMPRESS_STAGES_H_
