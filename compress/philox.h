// Philox4x32-10, a counter-based generator: Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC'11, section 3.2. And the draws of stochastic rounding: compress/FORMAT.md.
#ifndef THINWIRE_COMPRESS_PHILOX_H_
#define THINWIRE_COMPRESS_PHILOX_H_

#include <cstddef>

#include "compress/element_math.h"

namespace thinwire {

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

// The key and counter of an encoding's draws. Elements count from the tensor's first one, not from
// the chunk's.
struct Draws {
  uint64_t key = 0;     // of seed, tensor, hop and rank
  uint64_t stream = 0;  // the step
  uint64_t first = 0;   // index of the first element, a multiple of the block
};

// Sixteen elements share a generator call: element e takes draw (e % 256) / 16 of the call with
// counter e / 256 * 16 + e % 16. Draws are 16-bit windows of the four words, 8 bits apart and
// around the end: each is uniform, and neighbours share no more than what weighs a 256th.
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

// In (0, 1), never either: exact in fp32.
THINWIRE_HD float UniformOf(uint16_t draw) {
  return (static_cast<float>(draw) + 0.5f) * (1.0f / 65536.0f);
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_PHILOX_H_
