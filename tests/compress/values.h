// Inputs of codec tests, the same for every backend.
#ifndef THINWIRE_TESTS_COMPRESS_VALUES_H_
#define THINWIRE_TESTS_COMPRESS_VALUES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "compress/element_math.h"

namespace thinwire {

// Values for every path: plain, zero, -0, denormal, tiny, huge, infinite and NaN blocks, and maxima
// just above a bf16 value.
inline std::vector<float> Values(size_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(numel);
  for (size_t begin = 0; begin < numel; begin += 256) {
    const uint64_t kind = random() % 12;
    const float spread = std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
    for (size_t i = begin; i < std::min(numel, begin + 256); ++i) {
      values[i] = normal(random) * spread;
      if (kind == 0) values[i] = random() % 2 ? 0.0f : -0.0f;
      if (kind == 1) values[i] *= 1e-38f;                                 // denormal, tiny block
      if (kind == 2) values[i] = std::ldexp(normal(random), -101);        // around the tiny limit
      if (kind == 3) values[i] = std::ldexp(1.0f + normal(random), 126);  // around the huge limit
      if (kind == 8) values[i] = std::ldexp(values[i] / spread, 119);     // around hadamard's
    }
    const size_t place = begin + random() % 256;
    if (place >= numel) continue;
    if (kind == 4) values[place] = std::numeric_limits<float>::infinity();
    if (kind == 5) values[place] = -std::numeric_limits<float>::quiet_NaN();
    if (kind == 6) values[place] = 127.0f * FloatOf(0x40000001u);  // m / 127 just above bf16's 2
    if (kind == 7) values[place] = 7.0f * FloatOf(0x3f800001u);
  }
  return values;
}

// NaNs of both signs: quiet and signalling ones, those with one payload bit, the default of a CPU,
// the canonical one of a GPU (0x7fffffff), and random ones.
inline std::vector<float> Nans(size_t numel, uint64_t seed) {
  constexpr uint32_t kSome[] = {0x7f800001u, 0x7f807fffu, 0x7f80ffffu, 0x7f810000u, 0x7fbfffffu,
                                0x7fc00000u, 0x7fc00001u, 0x7fff0000u, 0x7fff8000u, 0x7fffffffu};
  std::mt19937_64 random(seed);
  std::vector<float> values(numel);
  for (float& value : values) {
    const uint64_t draw = random();
    const uint32_t payload = random() % 4 == 0 ? 1u << random() % 23 : random() % 0x7fffffu + 1;
    const uint32_t magnitude =
        draw % 2 == 0 ? kSome[draw / 4 % std::size(kSome)] : 0x7f800000u | payload;
    value = FloatOf(magnitude | (draw & 2) << 30);
  }
  return values;
}

inline std::vector<float> Normal(size_t numel, uint64_t seed, float spread = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

// Residuals are always finite, and never large.
inline std::vector<float> Residuals(size_t numel, uint64_t seed) {
  return Normal(numel, seed ^ 77, 0.25f);
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_COMPRESS_VALUES_H_
