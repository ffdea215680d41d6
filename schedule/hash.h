// 64-bit hashes that are the same on every rank and build: FNV-1a over bytes, then a finaliser.
#ifndef THINWIRE_SCHEDULE_HASH_H_
#define THINWIRE_SCHEDULE_HASH_H_

#include <cstdint>
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

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_HASH_H_
