// The decoding loop of int8, int4 and onebit. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_DECODE_INL_H_
#undef THINWIRE_COMPRESS_SIMD_DECODE_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE float LoadScale(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof(half));
  return FloatOf(static_cast<uint32_t>(half) << 16);
}

// Where a decoded vector goes. kPast goes past the caches: `out` lies on vectors' boundaries.
enum class To { kOut, kSum, kPast };

// Stores past the caches read no line before they overwrite it, which spares almost half of the
// traffic; but what the caches could have held is read from memory later.
inline constexpr size_t kPastCachesBytes = size_t{32} << 20;

HWY_INLINE bool GoesPastCaches(const Blocks& blocks, const float* out) {
  return blocks.count * blocks.block * sizeof(float) >= kPastCachesBytes &&
         reinterpret_cast<uintptr_t>(out) % sizeof(V) == 0;
}

template <int kBits, To kTo>
HWY_INLINE void DecodeLoop(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                           const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  constexpr size_t kStep = Unpacker<kBits>::kStep;
  const size_t block = blocks.block, count = blocks.count;  // which `out` might alias
  for (size_t b = 0; b < count; ++b) {
    const Unpacker<kBits> unpack(LoadScale(scales + 2 * b));
    for (size_t i = 0; i < block; i += kStep * kLanes) {
#pragma GCC unroll 8
      for (size_t t = 0; t < kStep; ++t) {
        V value = unpack.Values(codes, t);
        if constexpr (kTo == To::kSum) value = hn::Add(hn::LoadU(F(), out + kLanes * t), value);
        if constexpr (kTo == To::kPast) {
          hn::Stream(value, F(), out + kLanes * t);
        } else {
          hn::StoreU(value, F(), out + kLanes * t);
        }
      }
      codes += kStep * kLanes * kBits / 8;
      out += kStep * kLanes;
    }
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_DECODE_INL_H_
