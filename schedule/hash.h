// 64-bit hashes that are the same on every rank and build: HashBytes and HashCombine for names and
// numbers (FNV-1a, then a finaliser), DigestBytes for large buffers.
#ifndef THINWIRE_SCHEDULE_HASH_H_
#define THINWIRE_SCHEDULE_HASH_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace thinwire {

// The finaliser of MurmurHash3 (Appleby, public domain): every input bit reaches every output bit.
constexpr uint64_t Mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

constexpr uint64_t HashCombine(uint64_t seed, uint64_t value) {
  return Mix(seed * 0x9e3779b97f4a7c15ULL + Mix(value) + 1);
}

constexpr uint64_t HashBytes(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325ULL;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3ULL;
  return Mix(h);
}

// DigestBytes: a 64-bit digest of a large buffer, for comparing results.
//
// Word i (8 bytes, little-endian) enters lane i % 4 by h = rotl(h ^ word, 29) * P, which is
// one-to-one in both: buffers that differ in a single word, such as by one flipped bit, never have
// the same digest; other differences go unnoticed with probability 2^-64. The last words are padded
// with zeros, and the length enters at the end. Four lanes hide the multiplication's latency. Not
// cryptographic.
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

#endif  // THINWIRE_SCHEDULE_HASH_H_
