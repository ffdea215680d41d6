// The names of codecs and of their options, without what parses them.
#ifndef THINWIRE_COMPRESS_CODEC_ID_H_
#define THINWIRE_COMPRESS_CODEC_ID_H_

#include <cstdint>

namespace thinwire {

// The values are part of the handshake.
enum class CodecId : uint8_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3, kOneBit = 4, kTopK = 5 };

enum class Rounding : uint8_t { kNearest = 0, kStochastic = 1 };

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_ID_H_
