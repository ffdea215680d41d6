// Plan: how a bucket is cut into chunks, and a chunk into shards. A pure function of the bucket's
// size, the world and the options, so that all ranks agree without a word.
#ifndef THINWIRE_SCHEDULE_PLAN_H_
#define THINWIRE_SCHEDULE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compress/error_feedback.h"
#include "schedule/options.h"

namespace thinwire {

// Chunk offsets are multiples of this, whatever the codec's block.
inline constexpr size_t kChunkAlignment = 256;

struct Chunk {
  Range elements;              // of the bucket
  std::vector<size_t> bounds;  // n + 1 of them, of the bucket: rank r owns [bounds[r], bounds[r+1])

  size_t numel() const { return elements.end - elements.begin; }
  Range shard(int rank) const { return {bounds[rank], bounds[rank + 1]}; }
};

struct Plan {
  std::vector<Chunk> chunks;

  // What `rank` owns of the bucket: its shard of every chunk.
  std::vector<Range> OwnedBy(int rank) const;
  uint64_t Hash() const;
};

// Chunks of options.chunk_bytes of fp32, the last one shorter; shards of whole blocks, as even as
// blocks allow (so some are empty in a chunk of fewer than n blocks).
Plan MakePlan(size_t numel, int world, const Options& options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_PLAN_H_
