// topk on the CPU: the exact k largest in one pass over the data while last step's threshold holds.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_

#include "compress/backend.h"

namespace thinwire::codecs {

// Backend::EncodeEntries of at least one element. Writes all of the wire but its padding.
void EncodeTopK(const CodecSpec& spec, const EntryArgs& args);

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_TOPK_ENCODE_H_
