// fp32 arithmetic to the bit, NaNs included. IEEE 754 leaves the bits of a NaN open: a GPU returns
// one and the same, a CPU hands on the operand's, and FORMAT.md has bf16 keep them.
#ifndef THINWIRE_KERNELS_EXACT_FLOAT_H_
#define THINWIRE_KERNELS_EXACT_FLOAT_H_

#include "compress/element_math.h"

namespace thinwire::kernels {

inline constexpr uint32_t kQuietBit = 0x400000u;
inline constexpr uint32_t kDefaultNan = 0xffc00000u;  // x86's, of Inf - Inf and 0 * Inf

THINWIRE_HD bool IsNan(float x) { return x != x; }

THINWIRE_HD float NanOf(float a, float b) {
  if (IsNan(a)) return FloatOf(BitsOf(a) | kQuietBit);
  return FloatOf(IsNan(b) ? BitsOf(b) | kQuietBit : kDefaultNan);
}

THINWIRE_HD float Add(float a, float b) {
  const float sum = a + b;
  return IsNan(sum) ? NanOf(a, b) : sum;
}

THINWIRE_HD float Mul(float a, float b) {
  const float product = a * b;
  return IsNan(product) ? NanOf(a, b) : product;
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_EXACT_FLOAT_H_
