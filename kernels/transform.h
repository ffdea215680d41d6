// The Hadamard transform of compress/element_math.h, by a warp: a block of 256 is two quads in each
// of its lanes.
#ifndef THINWIRE_KERNELS_TRANSFORM_H_
#define THINWIRE_KERNELS_TRANSFORM_H_

#include <cmath>

#include "compress/element_math.h"
#include "kernels/jobs.h"
#include "kernels/tile.h"

namespace thinwire::kernels {

inline constexpr unsigned kTransformQuads = kTransform / kGroup;
static_assert(kTransformQuads == 2 && kQuads % kTransformQuads == 0, "a block lies in one warp");

// The random sign of an element times the factor that makes the transform orthonormal.
THINWIRE_HD float SignOf(const Codec& codec, unsigned place) {
  const unsigned i = place % kTransform;
  return codec.signs[i / 32] >> (i % 32) & 1 ? -0.0625f : 0.0625f;
}

// Multiplies every element by SignOf. Four signs take one load and one shift.
THINWIRE_HD void ApplySigns(const Codec& codec, unsigned thread, Values& x) {
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    const unsigned place = PlaceOf(thread, q) % kTransform;
    const uint32_t signs = codec.signs[place / 32] >> (place % 32);
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) {
      float& v = x.v[q * kQuad + i];
      v = FloatOf(BitsOf(v * 0.0625f) ^ (signs << (31 - i) & ~kAbsMask));
    }
  }
}

THINWIRE_HD void Butterfly(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum;
  b = difference;
}

// All butterflies, of strides 1, 2, 4, ..., 128, of every block of the tile.
template <typename Team>
THINWIRE_HD void TeamButterflies(Team& team, typename Team::template PerThread<Values>& x) {
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      float* v = x[thread].v + q * kQuad;
      Butterfly(v[0], v[1]), Butterfly(v[2], v[3]);  // stride 1
      Butterfly(v[0], v[2]), Butterfly(v[1], v[3]);  // stride 2
    }
  });
  typename Team::template PerThread<Values> other;
  THINWIRE_UNROLL
  for (unsigned mask = 1; mask < kWarp; mask *= 2) {  // strides 4 to 64: other lanes
    team.Exchange(x, mask, other);
    team.ForEach([&](unsigned thread) {
      // The product is exact, so this is a sum or a difference, in one instruction.
      const float sign = thread & mask ? -1.0f : 1.0f;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuads * kQuad; ++i) {
        x[thread].v[i] = fmaf(sign, x[thread].v[i], other[thread].v[i]);
      }
    });
  }
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; q += kTransformQuads) {  // stride 128: the other quad
      float* v = x[thread].v + q * kQuad;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kQuad; ++i) Butterfly(v[i], v[kQuad + i]);
    }
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TRANSFORM_H_
