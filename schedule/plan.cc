#include "schedule/plan.h"

#include <algorithm>
#include <numeric>

#include "compress/codec_list.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

std::vector<size_t> ShardBounds(Range chunk, int world, size_t block) {
  const size_t numel = chunk.end - chunk.begin;
  const size_t blocks = (numel + block - 1) / block;
  std::vector<size_t> bounds(world + 1);
  for (int r = 0; r <= world; ++r) {
    bounds[r] = chunk.begin + std::min(numel, blocks * r / world * block);
  }
  return bounds;
}

// Where the elements of one codec lie in the bucket; neighbours are one range.
std::vector<Range> RangesOf(uint32_t codec, std::span<const Segment> segments) {
  std::vector<Range> ranges;
  size_t at = 0;
  for (const Segment& segment : segments) {
    const Range range{at, at + segment.count};
    at = range.end;
    if (segment.codec != codec || segment.count == 0) continue;
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  return ranges;
}

size_t CountOf(const std::vector<Range>& ranges) {
  size_t count = 0;
  for (const Range& range : ranges) count += range.end - range.begin;
  return count;
}

// Elements [begin, end) of the elements that lie in `ranges`.
std::vector<Range> Cut(const std::vector<Range>& ranges, size_t begin, size_t end) {
  std::vector<Range> pieces;
  size_t at = 0;
  for (const Range& range : ranges) {
    const size_t count = range.end - range.begin;
    const size_t from = std::max(begin, at), to = std::min(end, at + count);
    if (from < to) pieces.push_back({range.begin + from - at, range.begin + to - at});
    at += count;
  }
  return pieces;
}

}  // namespace

Plan MakePlan(std::span<const Segment> segments, int world, const Options& options) {
  Plan plan;
  size_t base = 0;
  for (uint32_t codec = 0; codec < options.codecs.size(); ++codec) {
    const CodecPair& pair = options.codecs[codec];
    const std::vector<Range> ranges = RangesOf(codec, segments);
    const size_t numel = CountOf(ranges), block = std::lcm(pair.up.block, pair.down.block);
    const size_t unit = std::lcm(kChunkAlignment, block);
    const size_t step = std::max(unit, options.chunk_bytes / sizeof(float) / unit * unit);
    for (const Segment& segment : segments) {
      if (segment.codec == codec) plan.segments.push_back(segment);
    }
    for (size_t begin = 0, end = 0; begin < numel; begin = end) {
      // A small rest is no chunk of its own: every chunk costs two messages, and holds a lane.
      end = numel - begin <= step + step / 4 ? numel : begin + step;
      const Range elements{base + begin, base + end};
      plan.chunks.push_back({.elements = elements,
                             .bounds = ShardBounds(elements, world, block),
                             .pieces = Cut(ranges, begin, end),
                             .codec = codec,
                             .place = begin,
                             .sparse = InfoOf(pair.up.id).kind == CodecKind::kEntries});
    }
    base += numel;
  }
  return plan;
}

std::vector<Range> PlacesOf(std::span<const uint32_t> numbers, std::span<const Segment> segments) {
  std::vector<Range> places;
  for (const uint32_t number : numbers) {
    const Segment& wanted = segments[number];
    size_t begin = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      const bool before =
          segments[i].codec < wanted.codec || (segments[i].codec == wanted.codec && i < number);
      if (before) begin += segments[i].count;
    }
    places.push_back({begin, begin + wanted.count});
  }
  return places;
}

std::vector<Range> Plan::OwnedBy(int rank) const {
  std::vector<Range> owned;
  for (const Chunk& chunk : chunks) {
    const Range shard = chunk.shard(rank);
    if (!chunk.sparse && shard.begin != shard.end) owned.push_back(shard);
  }
  return owned;
}

uint64_t Plan::Hash() const {
  uint64_t hash = chunks.size();
  for (const Chunk& chunk : chunks) {
    hash = HashCombine(hash, chunk.codec);
    for (const size_t bound : chunk.bounds) hash = HashCombine(hash, bound);
    for (const Range& piece : chunk.pieces) hash = HashCombine(hash, piece.begin);
  }
  return hash;
}

}  // namespace thinwire
