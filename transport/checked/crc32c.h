// CRC32C, the Castagnoli polynomial (RFC 3720, appendix B.4): finds every damage of up to 32 bits
// in a row, every odd number of wrong bits, and other damage but for one case in four thousand
// million.
#ifndef THINWIRE_TRANSPORT_CHECKED_CRC32C_H_
#define THINWIRE_TRANSPORT_CHECKED_CRC32C_H_

#include <cstdint>

#include "compress/types.h"

namespace thinwire {

// Continues a CRC: the CRC32C of the bytes that gave `crc`, followed by `bytes`. It starts from 0.
uint32_t Crc32c(uint32_t crc, Bytes bytes);

// As Crc32c, and copies the bytes to `to` on the way.
uint32_t CopyWithCrc32c(uint32_t crc, Bytes bytes, uint8_t* to);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CHECKED_CRC32C_H_
