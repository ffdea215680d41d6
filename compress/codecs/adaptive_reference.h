// The normative scalar operations of adaptive.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_

#include <cstddef>
#include <cstdint>

#include "compress/codec_info.h"
#include "compress/shard_layout.h"

namespace thinwire::codecs {

extern const CodecOperations kAdaptiveReference;

// Bytes that a shard's codes take, by the widths that its heads give.
size_t AdaptiveCodesBytes(const Shard& shard, const uint8_t* wire);

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_
