// The element math of quantisers: compress/FORMAT.md, "Quantisers".
#ifndef THINWIRE_COMPRESS_QUANTISER_H_
#define THINWIRE_COMPRESS_QUANTISER_H_

#include <cmath>

#include "compress/hd.h"

namespace thinwire {

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

#endif  // THINWIRE_COMPRESS_QUANTISER_H_
