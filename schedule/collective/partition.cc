#include "schedule/collective/partition.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "schedule/collective/algorithm.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

// The ranges of one codec's elements in the bucket, with adjacent ranges merged.
std::vector<Range> ElementsOf(uint32_t codec, std::span<const Segment> segments) {
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

size_t CountOf(std::span<const Segment> segments) {
  size_t count = 0;
  for (const Segment& segment : segments) count += segment.count;
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

size_t BlockOf(const CodecPair& codec) { return std::lcm(codec.up.block, codec.down.block); }

// Calls visit(begin, end) for slices of about `step` elements, a multiple of `unit`. A small rest
// is joined to the last slice, since every chunk costs messages, and holds a lane.
template <typename Visit>
void ForEachSlice(size_t numel, size_t wanted, size_t unit, Visit visit) {
  const size_t step = std::max(unit, wanted / unit * unit);
  for (size_t begin = 0, end = 0; begin < numel; begin = end) {
    end = numel - begin <= step + step / 4 ? numel : begin + step;
    visit(begin, end);
  }
}

const Algorithm& AllReduceWith(const CodecPair& codec, int world, const Options& options) {
  if (codec.up.traits().entries()) return Entries();
  if (GoesByNodes(world, options)) return Hierarchical();
  return GoesByGrid(world, options) ? TwoLevel() : TwoHop();
}

bool HaveOneCodec(std::span<const Segment> segments) {
  return std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return segment.codec == segments.front().codec;
  });
}

// With p3 less may go outside the order of chunks, where it delays more urgent chunks.
size_t MostBytes(const Options& options) {
  return options.policy == Policy::kP3 ? options.min_bytes : options.one_hop_bytes;
}

}  // namespace

bool GoesRaw(size_t bytes, int world, const Options& options) {
  return bytes * (world - 1) <= options.min_bytes;
}

DirectExchange DirectExchangeOf(std::span<const Segment> segments, DType dtype, int world,
                                const Options& options) {
  const size_t numel = CountOf(segments);
  const size_t raw = numel * SizeOf(dtype);
  if (GoesRaw(raw, world, options)) return {&Raw(), raw * (world - 1)};
  const bool in_order = options.min_bytes == 0 || numel * sizeof(float) > options.chunk_bytes;
  if (in_order || !HaveOneCodec(segments)) return {};
  const CodecSpec& codec = options.codecs[segments.front().codec].up;
  const size_t bytes = EncodedBytes(codec, numel) * (world - 1);
  if (bytes > MostBytes(options)) return {};
  if (codec.traits().entries()) return {&Entries(), bytes};
  // Two hops would send `more` bytes less, which on a slow link is worth more than a latency.
  const size_t more = bytes * (world - 2) / world;
  return more <= options.min_bytes ? DirectExchange{&OneHop(), bytes} : DirectExchange{};
}

Partition MakePartition(std::span<const Segment> segments, int world, const Options& options) {
  Partition partition;
  size_t base = 0;
  for (uint32_t codec = 0; codec < options.codecs.size(); ++codec) {
    const CodecPair& pair = options.codecs[codec];
    const std::vector<Range> ranges = ElementsOf(codec, segments);
    const size_t numel = CountOf(ranges), block = BlockOf(pair);
    const Algorithm& algorithm = AllReduceWith(pair, world, options);
    for (const Segment& segment : segments) {
      if (segment.codec == codec) partition.segments.push_back(segment);
    }
    ForEachSlice(
        numel, options.chunk_bytes / sizeof(float), std::lcm(kChunkAlignment, block),
        [&](size_t begin, size_t end) {
          const Range elements{base + begin, base + end};
          partition.chunks.push_back({.elements = elements,
                                      .bounds = algorithm.shard_bounds(elements, world, block),
                                      .pieces = Cut(ranges, begin, end),
                                      .codec = codec,
                                      .codec_offset = begin,
                                      .algorithm = &algorithm,
                                      .columns = GridFor(world, options).columns});
        });
    base += numel;
  }
  return partition;
}

std::vector<double> HopShares(int world, const Options& options) {
  const size_t numel = options.chunk_bytes / sizeof(float);
  const Segment segment{.name = "chunk", .offset = 0, .count = numel, .total = numel};
  const Chunk chunk = MakePartition({&segment, 1}, world, options).chunks.front();
  std::vector<double> shares;
  double sum = 0.0;
  for (const PhaseCost& cost : chunk.algorithm->costs(chunk, options.codecs[0])) {
    if (cost.peers == 0) continue;  // no hop
    // Bytes inside nodes don't use the link between nodes.
    shares.push_back(cost.to == PhaseCost::To::kNode ? 0.0 : cost.bytes);
    sum += shares.back();
  }
  if (sum == 0.0) return {1.0};
  for (double& share : shares) share /= sum;
  return shares;
}

Partition MakeWhole(const Algorithm& algorithm, std::span<const Segment> segments, int world) {
  Partition partition;
  partition.segments.assign(segments.begin(), segments.end());
  const Range all{0, CountOf(segments)};
  partition.chunks.push_back({.elements = all,
                              .bounds = algorithm.shard_bounds(all, world, 1),
                              .pieces = {all},
                              .codec = segments.front().codec,
                              .algorithm = &algorithm});
  return partition;
}

namespace {

// Each chunk holds the same slice of every rank's part.
Partition MakeScattered(const Algorithm& algorithm, std::span<const Segment> segments, int world,
                        const Options& options) {
  Partition partition;
  partition.segments.assign(segments.begin(), segments.end());
  const uint32_t codec = segments.empty() ? 0 : segments.front().codec;
  const size_t unit = std::lcm(kChunkAlignment, BlockOf(options.codecs[codec]));
  const size_t part = CountOf(segments) / world;
  size_t base = 0;
  ForEachSlice(
      part, options.chunk_bytes / sizeof(float) / world, unit, [&](size_t begin, size_t end) {
        const Range elements{base, base + (end - begin) * world};
        std::vector<Range> pieces;
        for (int r = 0; r < world; ++r) {
          pieces.push_back({part * r + begin, part * r + end});
        }
        partition.chunks.push_back({.elements = elements,
                                    .bounds = algorithm.shard_bounds(elements, world, unit),
                                    .pieces = std::move(pieces),
                                    .codec = codec,
                                    .codec_offset = base,
                                    .algorithm = &algorithm});
        base = elements.end;
      });
  return partition;
}

}  // namespace

Partition MakeReduceScatter(std::span<const Segment> segments, int world, const Options& options) {
  return MakeScattered(ReduceScatter(), segments, world, options);
}

Partition MakeAllToAll(std::span<const Segment> segments, int world, const Options& options) {
  return MakeScattered(AllToAll(), segments, world, options);
}

Partition MakeAllGather(std::span<const Segment> segments, int world, const Options& options) {
  Partition partition;
  partition.segments.assign(segments.begin(), segments.end());
  const uint32_t codec = segments.empty() ? 0 : segments.front().codec;
  const size_t unit = std::lcm(kChunkAlignment, BlockOf(options.codecs[codec]));
  ForEachSlice(
      CountOf(segments), options.chunk_bytes / sizeof(float) / world, unit,
      [&](size_t begin, size_t end) {
        partition.chunks.push_back({.elements = {begin, end},
                                    .bounds = AllGather().shard_bounds({begin, end}, world, unit),
                                    .pieces = {{begin, end}},
                                    .codec = codec,
                                    .codec_offset = begin,
                                    .algorithm = &AllGather()});
      });
  return partition;
}

std::vector<Range> RangesOf(std::span<const uint32_t> numbers, std::span<const Segment> segments) {
  std::vector<Range> ranges;
  for (const uint32_t number : numbers) {
    const Segment& wanted = segments[number];
    size_t begin = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      const bool before =
          segments[i].codec < wanted.codec || (segments[i].codec == wanted.codec && i < number);
      if (before) begin += segments[i].count;
    }
    ranges.push_back({begin, begin + wanted.count});
  }
  return ranges;
}

std::vector<Range> Partition::SecondHopOf(int rank) const {
  std::vector<Range> ranges;
  for (const Chunk& chunk : chunks) {
    const Range range = chunk.algorithm->second_hop(chunk, rank);
    if (range.begin != range.end) ranges.push_back(range);
  }
  return ranges;
}

bool Partition::keeps_residuals() const {
  return std::any_of(chunks.begin(), chunks.end(),
                     [](const Chunk& chunk) { return chunk.algorithm->keeps_residuals; });
}

uint64_t Partition::Hash() const {
  uint64_t hash = chunks.size();
  for (const Chunk& chunk : chunks) {
    hash = HashCombine(HashCombine(hash, chunk.codec), HashBytes(chunk.algorithm->name));
    hash = HashCombine(hash, static_cast<uint64_t>(chunk.columns));
    for (const size_t bound : chunk.bounds) hash = HashCombine(hash, bound);
    for (const Range& piece : chunk.pieces) hash = HashCombine(hash, piece.begin);
  }
  return hash;
}

Grid GridOf(int world) {
  Grid grid{1, world};
  for (int rows = 2; rows * rows <= world; ++rows) {
    if (world % rows == 0) grid = {rows, world / rows};
  }
  return grid;
}

bool HasNodes(int world, const Options& options) {
  return options.local_size > 1 && world > options.local_size && world % options.local_size == 0;
}

bool GoesByGrid(int world, const Options& options) {
  const Grid grid = GridOf(world);
  switch (options.topology) {
    case Topology::kFlat:
    case Topology::kHierarchical: return false;
    case Topology::kGrid: return grid.rows > 1 || HasNodes(world, options);
    case Topology::kAuto: break;
  }
  return world >= kGridFrom && 2 * grid.messages() < world - 1;
}

bool GoesByNodes(int world, const Options& options) {
  return options.topology == Topology::kHierarchical && HasNodes(world, options);
}

Grid GridFor(int world, const Options& options) {
  const bool by_nodes = GoesByNodes(world, options) ||
                        (options.topology == Topology::kGrid && HasNodes(world, options));
  if (by_nodes) return {world / options.local_size, options.local_size};
  return GoesByGrid(world, options) ? GridOf(world) : Grid{1, world};
}

std::string DescribeWay(int world, const Options& options) {
  const Grid grid = GridFor(world, options);
  if (grid.rows == 1) return "flat";
  return GoesByNodes(world, options)
             ? absl::StrCat("hierarchical: ", grid.rows, " nodes of ", grid.columns, " ranks")
             : absl::StrCat("grid: ", grid.rows, " x ", grid.columns, " ranks");
}

Grid GridOf(const Chunk& chunk) { return {chunk.world() / chunk.columns, chunk.columns}; }

}  // namespace thinwire
