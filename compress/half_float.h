// bf16 and f16 (IEEE binary16) to and from fp32, rounding half to even; NaNs become quiet.
#ifndef THINWIRE_COMPRESS_HALF_FLOAT_H_
#define THINWIRE_COMPRESS_HALF_FLOAT_H_

#include "compress/hd.h"

namespace thinwire {

THINWIRE_HD float FromBf16(uint16_t half) { return FloatOf(static_cast<uint32_t>(half) << 16); }

THINWIRE_HD uint16_t ToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & kAbsMask) > kInfBits) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

THINWIRE_HD float FromF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) {  // Inf, or NaN made quiet
    const uint32_t quiet = magnitude > 0x7c00 ? 0x400000u : 0u;
    return FloatOf(sign | kInfBits | (magnitude & 0x3ff) << 13 | quiet);
  }
  // A subnormal's value is its bits times 2^-24; a normal's exponent moves by 127 - 15.
  if (magnitude < 0x400) {
    const float value = static_cast<float>(magnitude) * FloatOf((127u - 24u) << 23);
    return FloatOf(BitsOf(value) | sign);
  }
  return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
}

THINWIRE_HD uint16_t ToF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & kAbsMask;
  if (magnitude > kInfBits) {
    return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to Inf
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves value * 2^24, rounded half to even, in the low bits.
    const float shifted = FloatOf(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (BitsOf(shifted) - BitsOf(0.5f)));
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_HALF_FLOAT_H_
