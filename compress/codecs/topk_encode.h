// topk on the CPU: the exact k largest in one pass over the data while last step's threshold holds.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_

#include "compress/backend.h"

namespace thinwire::codecs {

// Backend::Encode of a topk spec; gradient.numel > 0. Writes all of the wire but its padding.
void EncodeTopK(const CodecSpec& spec, const TensorView& gradient, float* residual, uint8_t* wire,
                const EncodeExtras& extras);

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_
