// The element math that codecs share, one source for the CPU and for CUDA kernels: bit casts, bf16
// and f16; quantisers; and their two options, the draws of stochastic rounding and the randomised
// Hadamard transform. compress/FORMAT.md, "Quantisers", "Stochastic rounding" and
// "hadamard".
#ifndef THINWIRE_COMPRESS_ELEMENT_MATH_H_
#define THINWIRE_COMPRESS_ELEMENT_MATH_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// THINWIRE_UNROLL precedes a loop over an array that must stay in registers.
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

// Tests the bits, so that compilers' floating-point options do not matter.
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
inline constexpr uint32_t kHugeBits = (127u + 127u) << 23;  // 2^127; Inf and NaN are larger
inline constexpr uint16_t kNanScale = 0x7fc0;               // bf16 NaN

// The kind of a block follows from its magnitude, as bits without sign.
enum class BlockKind : uint8_t { kPlain, kTiny, kNonFinite };

THINWIRE_HD BlockKind KindOf(uint32_t magnitude) {
  if (magnitude < kTinyBits) return BlockKind::kTiny;
  return magnitude >= kHugeBits ? BlockKind::kNonFinite : BlockKind::kPlain;
}

// One comparison for "not plain".
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

// Rounds up with the probability of the fraction, for `uniform` in (0, 1): unbiased.
THINWIRE_HD int StochasticCodeOf(float x, float inverse, int qmax, float uniform) {
  const float scaled = x * inverse;
  const int code = static_cast<int>(floorf(scaled + uniform));
  return code > qmax ? qmax : code < -qmax ? -qmax : code;
}

// Exact: the product of an 8-bit significand and a code fits fp32, whether fused or not.
THINWIRE_HD float ValueOf(int code, float scale) { return static_cast<float>(code) * scale; }

// The element math of a codec of blocks, for the scalar reference and the kernels: codes from
// -kQmax to kQmax in steps of the scale. (onebit has the same members.)
template <int kQmax>
struct Quantiser {
  static constexpr bool kMean = false;       // a block's magnitude is its largest |x|
  static constexpr int kTinyCode = 0;        // the code of every element of a tiny block
  static constexpr bool kStochastic = true;  // supports rounding=stochastic

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

// The draws of rounding=stochastic. Philox4x32-10 is a counter-based generator: Salmon et al.,
// "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11, section 3.2.

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxMul[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};

struct Philox4 {
  uint32_t word[4];
};

THINWIRE_HD Philox4 Philox(Philox4 c, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.word[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The key and counter for the draws of an encoding. Elements count from the tensor's first one, not
// from the chunk's.
struct Draws {
  uint64_t key = 0;     // from seed, tensor, hop and rank
  uint64_t stream = 0;  // the step
  uint64_t first = 0;   // index of the first element, a multiple of the block
};

// Sixteen elements share a generator call: element e takes draw (e % 256) / 16 of the call with
// counter e / 256 * 16 + e % 16. Draws are 16-bit windows of the four words, 8 bits apart and
// wrapping around: each is uniform, and neighbours share only bits with a weight of at most 1/256
// in one of them.
inline constexpr size_t kDrawGroup = 256;
inline constexpr size_t kDrawLanes = 16;

THINWIRE_HD uint16_t DrawOf(const Draws& draws, uint64_t place) {
  const uint64_t e = draws.first + place;
  const uint64_t counter = e / kDrawGroup * kDrawLanes + e % kDrawLanes;
  const Philox4 random =
      Philox({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
               static_cast<uint32_t>(draws.stream), static_cast<uint32_t>(draws.stream >> 32)}},
             draws.key);
  const uint32_t draw = static_cast<uint32_t>(e % kDrawGroup / kDrawLanes);
  const uint32_t low = draw < 4 ? random.word[0] : random.word[1];
  const uint32_t high = draw < 12 ? random.word[2] : random.word[3];
  const uint64_t word = draw < 8 ? low : high;
  return static_cast<uint16_t>((word << 32 | word) >> (draw % 4 * 8));
}

// In (0, 1), exclusive; exact in fp32.
THINWIRE_HD float UniformOf(uint16_t draw) {
  return (static_cast<float>(draw) + 0.5f) * (1.0f / 65536.0f);
}

// The randomised transform of hadamard=1: Suresh et al., "Distributed Mean Estimation with Limited
// Communication", arXiv 1611.00429, section 3; the clipping of the largest values is ours.

inline constexpr size_t kTransform = 256;
inline constexpr float kClip = 0.8f;  // of a block's largest magnitude; codes beyond it saturate

// From this magnitude on a transformed block is not finite: a decoder sums 256 values of up to 8
// scales, and a scale is at most 0.8 / 7 of the magnitude, rounded up. Below it no such sum
// overflows fp32.
inline constexpr uint32_t kTransformHugeBits = (127u + 120u) << 23;  // 2^120

// The magnitude for KindOf of a transformed block, given that of its largest value.
THINWIRE_HD uint32_t TransformedMagnitude(uint32_t magnitude) {
  return magnitude < kTransformHugeBits ? magnitude : kInfBits;
}

// Tiny and non-finite blocks (scale 0 or NaN) are not transformed: they decode to 0 or NaN.
THINWIRE_HD bool IsTransformed(float scale) { return scale > 0.0f; }

// +-1/16 for each element: a random sign times the factor that makes the transform orthonormal. The
// sign is bit e % 32 of word e / 32 of Philox calls 0 and 1 under the seed; 1 is negative.
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
// determines how float sums round.
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

#endif  // THINWIRE_COMPRESS_ELEMENT_MATH_H_
