// Shard and Piece: what a codec's operations on the host work on.
#ifndef THINWIRE_COMPRESS_PIECE_H_
#define THINWIRE_COMPRESS_PIECE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "compress/codec_spec.h"
#include "compress/hadamard.h"
#include "compress/philox.h"
#include "compress/shard_layout.h"

namespace thinwire {

// One shard's codec, and what its blocks need besides.
struct Shard {
  Shard(const CodecSpec& shard_spec, size_t numel, const Draws& shard_draws = {})
      : spec(shard_spec), traits(spec.traits()), layout(LayoutOf(spec, numel)), draws(shard_draws) {
    if (spec.hadamard) TransformSigns(spec.seed, signs.data());
  }

  const CodecSpec& spec;
  const CodecTraits& traits;
  const ShardLayout layout;
  const Draws draws;
  alignas(64) std::array<float, kTransform> signs;  // set if the spec has hadamard=1
};

// Elements [begin, begin + numel) of a dense shard; `begin` lies on a block border.
struct Piece {
  Piece(const Shard& of, size_t first, size_t count) : shard(of), begin(first), numel(count) {
    draws = shard.draws;
    draws.first += begin;
  }

  const Shard& shard;
  const size_t begin, numel;
  Draws draws;  // of its first element on

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

#endif  // THINWIRE_COMPRESS_PIECE_H_
