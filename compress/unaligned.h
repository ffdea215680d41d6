// Elements at any alignment: frameworks hand out slices at any element, C callers at any address.
#ifndef THINWIRE_COMPRESS_UNALIGNED_H_
#define THINWIRE_COMPRESS_UNALIGNED_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace thinwire {

template <typename T>
T Get(const void* base, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(void* base, size_t i, T value) {
  std::memcpy(static_cast<uint8_t*>(base) + i * sizeof(T), &value, sizeof(T));
}

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_UNALIGNED_H_
