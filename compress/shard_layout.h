// ShardLayout: where the parts of an encoded shard lie; compress/FORMAT.md, "Layout".
#ifndef THINWIRE_COMPRESS_SHARD_LAYOUT_H_
#define THINWIRE_COMPRESS_SHARD_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "compress/codec_spec.h"

namespace thinwire {

// Head and codes are each padded to 16 bytes. Blocks: all scales, then all codes. Entries: a count
// for each sub-block, then the entries.
struct ShardLayout {
  size_t blocks;       // scales of 2 bytes each, or counts of 4
  size_t head_bytes;   // of the scales or counts, without the padding behind them
  size_t codes_at;     // bytes before the codes or entries
  size_t codes_bytes;  // without the padding behind them
  size_t bytes;        // in all
};

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel);

// Zeroes what lies behind the head and behind the codes.
void ZeroPadding(const ShardLayout& layout, uint8_t* wire);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_SHARD_LAYOUT_H_
