// DigestBytes: 64 bits of many bytes, the same on every rank and build, for comparing results.
#ifndef THINWIRE_SCHEDULE_DIGEST_H_
#define THINWIRE_SCHEDULE_DIGEST_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "schedule/hash.h"

namespace thinwire {

// Word i (8 bytes, little-endian) enters lane i % 4 by h = rotl(h ^ word, 29) * P, which is
// one-to-one in both: bytes that differ in one word, such as one flipped bit, never have the same
// digest, and others do by a chance of 2^-64. The last words are padded with zeros, and the length
// enters at the end. The four lanes hide the multiplication's latency: 10 GB/s and more. It is no
// defence against somebody who wants to deceive.
inline uint64_t DigestBytes(std::span<const uint8_t> bytes) {
  constexpr uint64_t kPrime = 0x9e3779b185ebca87ULL;
  constexpr size_t kStride = 4 * sizeof(uint64_t);
  uint64_t lanes[4] = {1, 2, 3, 4};
  const auto take = [&](const uint8_t* at) {
    uint64_t words[4];
    std::memcpy(words, at, kStride);
    for (int i = 0; i < 4; ++i) lanes[i] = std::rotl(lanes[i] ^ words[i], 29) * kPrime;
  };
  size_t at = 0;
  for (; at + kStride <= bytes.size(); at += kStride) take(bytes.data() + at);
  if (at < bytes.size()) {
    uint8_t tail[kStride] = {};
    std::memcpy(tail, bytes.data() + at, bytes.size() - at);
    take(tail);
  }
  uint64_t digest = bytes.size();
  for (const uint64_t lane : lanes) digest = HashCombine(digest, lane);
  return digest;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_DIGEST_H_
