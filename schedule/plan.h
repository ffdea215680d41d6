// Plan: how a bucket is cut into chunks, and a chunk into shards. A pure function of the bucket's
// segments, the world and the options, so that all ranks agree without a word.
#ifndef THINWIRE_SCHEDULE_PLAN_H_
#define THINWIRE_SCHEDULE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "compress/error_feedback.h"
#include "schedule/options.h"

namespace thinwire {

// Chunk offsets are multiples of this within the elements of their codec, whatever its block.
inline constexpr size_t kChunkAlignment = 256;

struct Chunk {
  Range elements;              // in the plan's order
  std::vector<size_t> bounds;  // n + 1 of them: rank r owns [bounds[r], bounds[r + 1])
  std::vector<Range> pieces;   // where its elements lie in the bucket, one after another
  uint32_t codec = 0;          // of Options::codecs
  size_t place = 0;            // of its first element among those of its codec
  bool sparse = false;         // entries: nobody owns a shard, everybody gets all

  size_t numel() const { return elements.end - elements.begin; }
  Range shard(int rank) const { return {bounds[rank], bounds[rank + 1]}; }
};

struct Plan {
  // The bucket's segments, those of one codec together. With one codec this is the bucket's order.
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;

  // What `rank` owns of the plan's elements: its shard of every chunk.
  std::vector<Range> OwnedBy(int rank) const;
  uint64_t Hash() const;
};

// Chunks of options.chunk_bytes of fp32, the last one of a codec shorter or up to a quarter longer;
// shards of whole blocks, as even as blocks allow (so some are empty in a chunk of fewer than n
// blocks).
Plan MakePlan(std::span<const Segment> segments, int world, const Options& options);

// Where the segments with these numbers lie in the plan's order.
std::vector<Range> PlacesOf(std::span<const uint32_t> numbers, std::span<const Segment> segments);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_PLAN_H_
