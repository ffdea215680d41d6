// The element math that every codec shares, one source for the CPU and for CUDA kernels: bit casts,
// bf16 and f16, and quantisers. compress/FORMAT.md, "Quantisers".
#ifndef THINWIRE_COMPRESS_ELEMENT_MATH_H_
#define THINWIRE_COMPRESS_ELEMENT_MATH_H_

#include <cmath>
#include <cstdint>
#include <cstring>

// THINWIRE_UNROLL stands before a loop over an array that is to stay in registers.
#ifdef __CUDACC__
#define THINWIRE_HD __host__ __device__ __forceinline__
#else
#define THINWIRE_HD inline
#endif
#ifdef __CUDA_ARCH__
#define THINWIRE_UNROLL _Pragma("unroll")
#else
#define THINWIRE_UNROLL
#endif

namespace thinwire {

THINWIRE_HD uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

THINWIRE_HD float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline constexpr uint32_t kAbsMask = 0x7fffffffu;
inline constexpr uint32_t kInfBits = 0x7f800000u;

// By the bits, which no compiler's floating-point options change.
THINWIRE_HD bool IsFinite(float value) { return (BitsOf(value) & kAbsMask) < kInfBits; }

// bf16 and f16 (IEEE binary16) to and from fp32, rounding half to even; NaNs become quiet.

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

// Quantisers.

inline constexpr uint32_t kTinyBits = (127u - 100u) << 23;  // 2^-100
inline constexpr uint32_t kHugeBits = (127u + 127u) << 23;  // 2^127; Inf and NaN lie above
inline constexpr uint16_t kNanScale = 0x7fc0;               // bf16 NaN

// The kind of a block follows from its magnitude, as bits without sign.
enum class BlockKind : uint8_t { kPlain, kTiny, kNonFinite };

THINWIRE_HD BlockKind KindOf(uint32_t magnitude) {
  if (magnitude < kTinyBits) return BlockKind::kTiny;
  return magnitude >= kHugeBits ? BlockKind::kNonFinite : BlockKind::kPlain;
}

// One comparison for "anything but plain".
THINWIRE_HD bool IsSpecial(uint32_t magnitude) {
  return magnitude - kTinyBits >= kHugeBits - kTinyBits;
}

// The step size: m / qmax as bf16, rounded up so that no code exceeds qmax by more than rounding.
THINWIRE_HD float ScaleOf(uint32_t magnitude, float qmax) {
  const uint32_t bits = BitsOf(FloatOf(magnitude) / qmax) + 0xffffu;
  return FloatOf(bits & 0xffff0000u);
}

THINWIRE_HD int CodeOf(float x, float inverse, int qmax) {
  const int code = static_cast<int>(rintf(x * inverse));  // half to even
  return code > qmax ? qmax : code < -qmax ? -qmax : code;
}

// Up with the probability of the fraction, for `uniform` in (0, 1): unbiased.
THINWIRE_HD int StochasticCodeOf(float x, float inverse, int qmax, float uniform) {
  const float scaled = x * inverse;
  const int code = static_cast<int>(floorf(scaled + uniform));
  return code > qmax ? qmax : code < -qmax ? -qmax : code;
}

// Exact: the product of an 8-bit significand and a code fits fp32, whether fused or not.
THINWIRE_HD float ValueOf(int code, float scale) { return static_cast<float>(code) * scale; }

// The element math of a codec of blocks, as the scalar reference and the kernels use it: codes from
// -kQmax to kQmax in steps of the scale. (onebit has the same members.)
template <int kQmax>
struct Quantiser {
  static constexpr bool kMean = false;       // a block's magnitude is its largest |x|
  static constexpr int kTinyCode = 0;        // of every element of a tiny block
  static constexpr bool kStochastic = true;  // it knows rounding=stochastic

  // The scale of a plain block; `magnitude` as bits without sign.
  THINWIRE_HD static float PlainScale(uint32_t magnitude) {
    return ScaleOf(magnitude, static_cast<float>(kQmax));
  }
  // `inverse` is 1 / scale.
  THINWIRE_HD static int CodeFor(float x, float inverse) { return CodeOf(x, inverse, kQmax); }
  THINWIRE_HD static int StochasticCodeFor(float x, float inverse, float uniform) {
    return StochasticCodeOf(x, inverse, kQmax, uniform);
  }
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ELEMENT_MATH_H_
