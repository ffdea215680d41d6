// ShardLayout: where the parts of an encoded shard lie; compress/FORMAT.md, "Layout". Shard and
// Piece: what a codec's operations on the host work on.
#ifndef THINWIRE_COMPRESS_SHARD_LAYOUT_H_
#define THINWIRE_COMPRESS_SHARD_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "compress/codec_spec.h"
#include "compress/hadamard.h"
#include "compress/philox.h"

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

// One shard's codec, and what its blocks need besides.
struct Shard {
  Shard(const CodecSpec& shard_spec, size_t numel, const Draws& shard_draws = {})
      : spec(shard_spec), traits(spec.traits()), layout(LayoutOf(spec, numel)), draws(shard_draws) {
    if (spec.hadamard || traits.widths()) TransformSigns(spec.seed, signs.data());
  }

  const CodecSpec& spec;
  const CodecTraits& traits;
  const ShardLayout layout;
  const Draws draws;
  alignas(64) std::array<float, kTransform> signs;  // set if the codec transforms
};

// Where the codes of a shard of kWidths are read or written, block after block: compress/FORMAT.md,
// "adaptive". DenseOperations::begin sets it to a shard's first block.
struct Walk {
  int threshold = 0;   // of the widths
  size_t raised = 0;   // blocks before this one take the threshold below
  size_t next_at = 0;  // bytes of codes before the next block's
};

// Zeroes the codes that no block has taken.
inline void ZeroBehind(const Shard& shard, const Walk& walk, uint8_t* wire) {
  std::memset(wire + shard.layout.codes_at + walk.next_at, 0,
              shard.layout.codes_bytes - walk.next_at);
}

// Elements [begin, begin + numel) of a dense shard; `begin` lies on a block border.
struct Piece {
  Piece(const Shard& of, size_t first, size_t count, Walk* of_wire = nullptr)
      : shard(of), begin(first), numel(count), walk(of_wire) {
    draws = shard.draws;
    draws.first += begin;
  }

  const Shard& shard;
  const size_t begin, numel;
  Walk* const walk;  // kWidths: has come to the piece, and is taken to its end; null: no codes
  Draws draws;       // of its first element on

  bool in_blocks() const { return shard.traits.kind == CodecKind::kBlocks; }
  size_t block() const { return shard.spec.block; }
  size_t full_blocks() const { return in_blocks() ? numel / block() : 0; }
  size_t rest() const { return in_blocks() ? numel % block() : 0; }  // elements behind those
  size_t scales_offset() const { return in_blocks() ? begin / block() * sizeof(uint16_t) : 0; }
  size_t codes_offset() const { return shard.layout.codes_at + begin * shard.traits.code_bits / 8; }
  size_t codes_bytes() const { return (numel * shard.traits.code_bits + 7) / 8; }

  // The part behind the last full block.
  Piece Tail() const {
    const size_t full = full_blocks() * block();
    return {shard, begin + full, numel - full};
  }
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_SHARD_LAYOUT_H_
