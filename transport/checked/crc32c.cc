#include "transport/checked/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstring>

namespace thinwire {
namespace {

// Bytes are copied and counted piece by piece: a piece is still in the first-level cache after its
// copy, and well below the library's limit of an int.
constexpr size_t kPiece = 16 << 10;

// The library leaves the two inversions of the standard to its caller. It reads only, although its
// pointer is to mutable bytes.
uint32_t Extend(uint32_t crc, const uint8_t* bytes, size_t count) {
  return ~crc32_iscsi(const_cast<uint8_t*>(bytes), static_cast<int>(count), ~crc);
}

}  // namespace

uint32_t Crc32c(uint32_t crc, Bytes bytes) {
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    crc = Extend(crc, bytes.data() + at, std::min(kPiece, bytes.size() - at));
  }
  return crc;
}

uint32_t CopyWithCrc32c(uint32_t crc, Bytes bytes, uint8_t* to) {
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    const size_t count = std::min(kPiece, bytes.size() - at);
    std::memcpy(to + at, bytes.data() + at, count);
    crc = Extend(crc, to + at, count);
  }
  return crc;
}

}  // namespace thinwire
