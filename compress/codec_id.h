// The number of a codec, and the rounding modes, without what parses or describes them.
#ifndef THINWIRE_COMPRESS_CODEC_ID_H_
#define THINWIRE_COMPRESS_CODEC_ID_H_

#include <cstdint>

namespace thinwire {

// A codec's place in compress/codec_list.h. Each codec names its own in its header; the numbers are
// part of the handshake.
enum class CodecId : uint8_t {};

enum class Rounding : uint8_t { kNearest = 0, kStochastic = 1 };

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_ID_H_
