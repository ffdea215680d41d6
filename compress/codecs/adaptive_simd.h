// The loops of adaptive, for the best instruction set of this CPU. Bytes equal those of
// adaptive_reference.h.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_SIMD_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_SIMD_H_

#include "compress/codec_info.h"

namespace thinwire::codecs {

extern const CodecOperations kAdaptiveSimd;

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_SIMD_H_
