// The normative scalar operations of adaptive.
#ifndef THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_

#include "compress/codec_info.h"

namespace thinwire::codecs {

extern const CodecOperations kAdaptiveReference;

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_REFERENCE_H_
