// fp32 arithmetic that is exact to the bit, NaNs included. IEEE 754 does not specify the bits of a
// NaN: a GPU always returns the same ones, a CPU passes on the operand's, and bf16 keeps them
// according to FORMAT.md.
#ifndef THINWIRE_KERNELS_EXACT_FLOAT_H_
#define THINWIRE_KERNELS_EXACT_FLOAT_H_

#include "compress/element_math.h"

namespace thinwire::kernels {

inline constexpr uint32_t kQuietBit = 0x400000u;
inline constexpr uint32_t kDefaultNan = 0xffc00000u;  // x86's result of Inf - Inf and 0 * Inf

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
