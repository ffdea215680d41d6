// Sums and products of all elements that a thread holds, exact to the bit (exact_float.h).
#ifndef THINWIRE_KERNELS_EXACT_SUMS_H_
#define THINWIRE_KERNELS_EXACT_SUMS_H_

#include "kernels/exact_float.h"
#include "kernels/tile.h"

namespace thinwire::kernels {

// to[i] = plain(i) for a quad. If one of them is NaN, exact(i) is used, which also gives the right
// NaN bits: one check and one branch per quad.
template <typename Plain, typename Exact>
THINWIRE_HD void PutExact(float* to, Plain plain, Exact exact) {
  float sum[kQuad];
  bool nan = false;
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) {
    sum[i] = plain(i);
    nan |= IsNan(sum[i]);
  }
  if (nan) {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuad; ++i) sum[i] = exact(i);
  }
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) to[i] = sum[i];
}

// a += b, for all elements that a thread holds.
THINWIRE_HD void AddValues(Values& a, const Values& b) {
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    float* const to = a.v + q * kQuad;
    const float* const from = b.v + q * kQuad;
    PutExact(
        to, [&](unsigned i) { return to[i] + from[i]; },
        [&](unsigned i) { return Add(to[i], from[i]); });
  }
}

// The same, but the bits of NaNs are arbitrary.
THINWIRE_HD void AddNumbers(Values& a, const Values& b) {
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kQuads * kQuad; ++k) a.v[k] = a.v[k] + b.v[k];
}

THINWIRE_HD bool HasNan(const Values& x) {
  bool nan = false;
  THINWIRE_UNROLL
  for (unsigned k = 0; k < kQuads * kQuad; ++k) nan |= IsNan(x.v[k]);
  return nan;
}

// x = factor * base + x, product and sum rounded one after the other.
THINWIRE_HD void AddScaled(float factor, const Values& base, Values& x) {
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    float* const to = x.v + q * kQuad;
    const float* const from = base.v + q * kQuad;
    PutExact(
        to, [&](unsigned i) { return factor * from[i] + to[i]; },
        [&](unsigned i) { return Add(Mul(factor, from[i]), to[i]); });
  }
}

// x *= factor
THINWIRE_HD void ScaleValues(float factor, Values& x) {
  THINWIRE_UNROLL
  for (unsigned q = 0; q < kQuads; ++q) {
    float* const to = x.v + q * kQuad;
    PutExact(
        to, [&](unsigned i) { return to[i] * factor; },
        [&](unsigned i) { return Mul(to[i], factor); });
  }
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_EXACT_SUMS_H_
