// The blocks that go through the Hadamard transform, in a buffer. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_TRANSFORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_TRANSFORM_INL_H_
#undef THINWIRE_COMPRESS_SIMD_TRANSFORM_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_TRANSFORM_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/hadamard.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One butterfly of a stride below the vector's length: the partner, plus or minus the own value.
template <size_t kStride>
HWY_INLINE V ButterflyWithin(V v) {
  alignas(64) uint32_t minus[kLanes];
  for (size_t i = 0; i < kLanes; ++i) minus[i] = i & kStride ? ~kAbsMask : 0;
  const V own = hn::Xor(v, hn::BitCast(F(), hn::Load(U(), minus)));
  if constexpr (kStride == 1) return hn::Add(hn::Shuffle2301(v), own);
  if constexpr (kStride == 2) return hn::Add(hn::Shuffle1032(v), own);
  if constexpr (kStride == 4) return hn::Add(hn::SwapAdjacentBlocks(v), own);
  if constexpr (kStride == 8) return hn::Add(hn::ConcatLowerUpper(F(), v, v), own);
}

// Butterflies of hadamard.h on 256 aligned floats.
HWY_INLINE void ButterfliesOf(float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    V v = ButterflyWithin<2>(ButterflyWithin<1>(hn::Load(F(), x + i)));
    if constexpr (kLanes >= 8) v = ButterflyWithin<4>(v);
    if constexpr (kLanes >= 16) v = ButterflyWithin<8>(v);
    hn::Store(v, F(), x + i);
  }
  for (size_t stride = kLanes; stride < kTransform; stride *= 2) {
    for (size_t begin = 0; begin < kTransform; begin += 2 * stride) {
      for (size_t i = begin; i < begin + stride; i += kLanes) {
        const V a = hn::Load(F(), x + i), b = hn::Load(F(), x + i + stride);
        hn::Store(hn::Add(a, b), F(), x + i);
        hn::Store(hn::Sub(a, b), F(), x + i + stride);
      }
    }
  }
}

HWY_INLINE void MultiplyBy(const float* HWY_RESTRICT factors, float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(F(), x + i), hn::Load(F(), factors + i)), F(), x + i);
  }
}

// Blocks of 256 that are encoded in 4 bits after the transform.
template <bool kFeedback, class Rounding>
HWY_INLINE void EncodeTransformed(const Blocks& blocks, Rounding& rounding,
                                  const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                  uint8_t* HWY_RESTRICT scales, uint8_t* HWY_RESTRICT codes) {
  constexpr size_t kCount = kTransform / kLanes;
  alignas(64) float buffer[kTransform];
  const auto in_buffer = [&](size_t j) HWY_ATTR { return hn::Load(F(), buffer + kLanes * j); };
  for (size_t b = 0; b < blocks.count; ++b, g += kTransform, r += kFeedback ? kTransform : 0) {
    uint8_t* scale = scales + 2 * b;
    uint8_t* to = codes + kTransform / 2 * b;
    PrefetchBlock(g, kTransform * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r, kTransform * sizeof(float));
    for (size_t j = 0; j < kTransform; j += kLanes) {
      hn::Store(LoadX<kFeedback>(g, r, j), F(), buffer + j);
    }
    MultiplyBy(blocks.signs, buffer);
    ButterfliesOf(buffer);
    BlockScale s = HeadOf<4>(kCount, kTransform, in_buffer);
    const uint32_t magnitude = TransformedMagnitude(s.magnitude());
    if (HWY_UNLIKELY(IsSpecial(magnitude))) {
      EncodeSpecial<4, kFeedback>(kCount, magnitude, g, r, scale, to);
      continue;
    }
    const float clipped = kClip * FloatOf(magnitude);
    s = ScaleFor<4>(hn::BitCast(I(), hn::Set(F(), clipped)));
    StoreScale(s.scale, scale);
    rounding.Prepare(b);
    QuantiseBlock<4>(kCount, s, Clamped(rounding.ForBlock(b)), in_buffer, to,
                     [&](size_t j, V, V code)
                         HWY_ATTR { hn::Store(hn::Mul(code, s.scale), F(), buffer + kLanes * j); });
    if constexpr (!kFeedback) continue;
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < kTransform; j += kLanes) {
      const V x = LoadX<true>(g, r, j);
      hn::StoreU(hn::Sub(x, hn::Load(F(), buffer + j)), F(), r + j);
    }
  }
}

// Undoes the transform of decoded blocks of 256.
template <To kTo>
HWY_INLINE void DecodeTransformed(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                                  const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  alignas(64) float buffer[kTransform];
  for (size_t b = 0; b < blocks.count; ++b, out += kTransform, codes += kTransform / 2) {
    const Blocks one{.bits = 4, .block = kTransform, .count = 1, .filled = kTransform};
    if (HWY_UNLIKELY(!IsTransformed(LoadScale(scales + 2 * b)))) {
      DecodeLoop<4, kTo>(one, scales + 2 * b, codes, out);
      continue;
    }
    DecodeLoop<4, To::kOut>(one, scales + 2 * b, codes, buffer);
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < kTransform; j += kLanes) {
      V value = hn::Load(F(), buffer + j);
      if constexpr (kTo == To::kSum) value = hn::Add(hn::LoadU(F(), out + j), value);
      hn::StoreU(value, F(), out + j);
    }
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_TRANSFORM_INL_H_
