// The randomised Hadamard transform of hadamard=1: compress/FORMAT.md, "hadamard".
// Suresh et al., "Distributed Mean Estimation with Limited Communication", arXiv 1611.00429,
// section 3; the clipping of the largest values is ours.
#ifndef THINWIRE_COMPRESS_HADAMARD_H_
#define THINWIRE_COMPRESS_HADAMARD_H_

#include <cstddef>

#include "compress/philox.h"

namespace thinwire {

inline constexpr size_t kTransform = 256;
inline constexpr float kClip = 0.8f;  // of a block's largest magnitude; codes beyond it saturate

// From here on a transformed block is not finite: a decoder adds up 256 values of up to 8 scales,
// and a scale is at most 0.8 / 7 of the magnitude, rounded up. Below this no such sum leaves fp32.
inline constexpr uint32_t kTransformHugeBits = (127u + 120u) << 23;  // 2^120

// The magnitude that tells a transformed block's kind (KindOf), from its largest value's.
THINWIRE_HD uint32_t TransformedMagnitude(uint32_t magnitude) {
  return magnitude < kTransformHugeBits ? magnitude : kInfBits;
}

// Tiny blocks and those that are not finite (scale 0 or NaN) decode to 0 or NaN as they are.
THINWIRE_HD bool IsTransformed(float scale) { return scale > 0.0f; }

// +-1/16 for each element: the random sign, and what makes the transform orthonormal. Bit e % 32 of
// word e / 32 of Philox calls 0 and 1 under the seed; 1 is negative.
THINWIRE_HD void TransformSigns(uint64_t seed, float* signs) {
  for (uint32_t call = 0; call < 2; ++call) {
    const Philox4 random = Philox({{call, 0, 0, 0}}, seed);
    for (size_t i = 0; i < kTransform / 2; ++i) {
      const bool negative = random.word[i / 32] >> (i % 32) & 1;
      signs[call * kTransform / 2 + i] = negative ? -0.0625f : 0.0625f;
    }
  }
}

// The unscaled transform, in place: butterflies of stride 1, 2, 4, ..., 128, in this order, which
// decides how sums of floats round.
template <typename T>
THINWIRE_HD void Butterflies(T* x) {
  for (size_t stride = 1; stride < kTransform; stride *= 2) {
    for (size_t i = 0; i < kTransform; ++i) {
      if (i & stride) continue;
      const T a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_HADAMARD_H_
