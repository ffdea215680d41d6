// Partition: how a bucket is cut into chunks, and a chunk into shards. A pure function of the
// bucket, the world and the options, so that all ranks agree without a word; its hash proves it.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_PARTITION_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_PARTITION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compress/error_feedback.h"
#include "schedule/collective/algorithm.h"
#include "schedule/options.h"
#include "schedule/request.h"

namespace thinwire {

// Chunk offsets are multiples of this within the elements of their codec, whatever its block.
inline constexpr size_t kChunkAlignment = 256;

struct Partition {
  // The bucket's segments, those of one codec together. With one codec this is the bucket's order.
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;

  // The elements whose residual on `rank` is of the second hop.
  std::vector<Range> SecondHopOf(int rank) const;
  bool keeps_residuals() const;
  uint64_t Hash() const;
};

// An allreduce in chunks of options.chunk_bytes of fp32, the last one of a codec shorter or up to a
// quarter longer; shards of whole blocks, as even as blocks allow (so some are empty in a chunk of
// fewer than n blocks).
Partition MakePartition(std::span<const Segment> segments, int world, const Options& options);

// True if an allreduce of that many raw bytes goes uncompressed.
bool GoesRaw(size_t bytes, int world, const Options& options);

// An allreduce that is exchanged at once, in one hop, outside the order of chunks. In place of an
// announcement and two hops it costs one latency, and (n - 1) times its wire bytes.
struct DirectExchange {
  const Algorithm* algorithm = nullptr;  // of one hop; null: the tensor goes in chunks
  size_t bytes = 0;                      // that a rank sends, to all its peers together
};

// The direct exchange of an allreduce of the segments, of which there is at least one.
DirectExchange DirectExchangeOf(std::span<const Segment> segments, DType dtype, int world,
                                const Options& options);

// The parts of a dense chunk's bytes between nodes that the hops of its allreduce carry, in order,
// with options.codecs[0]; 0 for a hop inside nodes. There is at least one, and their sum is 1.
std::vector<double> HopShares(int world, const Options& options);

// One chunk of all elements in the bucket's order, for algorithms that cut nothing: Raw, Local.
Partition MakeWhole(const Algorithm& algorithm, std::span<const Segment> segments, int world);

// A reduce-scatter: each chunk holds the same slice of every rank's part. The segments have one
// codec, and n divides their elements.
Partition MakeReduceScatter(std::span<const Segment> segments, int world, const Options& options);
// An all-to-all, cut in the same way.
Partition MakeAllToAll(std::span<const Segment> segments, int world, const Options& options);

// An all-gather of this rank's elements. The segments have one codec.
Partition MakeAllGather(std::span<const Segment> segments, int world, const Options& options);

// Where the segments with these numbers lie in the order of MakePartition.
std::vector<Range> RangesOf(std::span<const uint32_t> numbers, std::span<const Segment> segments);

// Grid: a world as rows and columns of ranks, for the allreduces of two levels (two_level.cc). Rank
// row * columns + column stands at (row, column), so a row holds neighbours, which often share a
// machine; what goes along rows is the larger part of the bytes. In a hierarchy a row is a node.
//
// A pure function of the world and the options, so that all ranks agree without a word.
struct Grid {
  int rows = 1, columns = 1;

  int row(int rank) const { return rank / columns; }
  int column(int rank) const { return rank % columns; }
  int rank(int row, int column) const { return row * columns + column; }
  // The number of the shard that the rank at (row, column) owns. The shards of a column follow one
  // another, so that a column's part of a chunk is one range.
  int shard(int row, int column) const { return column * rows + row; }
  // Messages of a rank in the reduce-scatter of a chunk; as many again in the all-gather.
  int messages() const { return rows + columns - 2; }

  // The part of a chunk that a column reduces.
  Range part(const Chunk& chunk, int column) const {
    return {chunk.bounds[column * rows], chunk.bounds[(column + 1) * rows]};
  }
};

// The grid nearest to a square; one row where the world is prime.
Grid GridOf(int world);

// True if options.local_size cuts the world into several nodes of several ranks.
bool HasNodes(int world, const Options& options);

// True if dense allreduces of this world use its grid: as options.topology says; if that is
// kAuto, from kGridFrom ranks on, unless the grid is so long that it saves less than half of the
// messages.
bool GoesByGrid(int world, const Options& options);

// True if they go by nodes, which exchange elements as they are inside: options.topology is
// kHierarchical, and there are nodes.
bool GoesByNodes(int world, const Options& options);

// The grid of either; a world that goes flat is one row. Where topology is kGrid and there are
// nodes, they are the rows: a rank sends the fewest bytes between nodes, encoded ones inside too.
Grid GridFor(int world, const Options& options);
// The grid that the chunk's partition was made for.
Grid GridOf(const Chunk& chunk);

// The way of dense allreduces, such as "hierarchical: 2 nodes of 2 ranks".
std::string DescribeWay(int world, const Options& options);

// Where a flat exchange of a bucket of 25 MiB (DDP's) falls behind: docs/explanation/scale.md.
inline constexpr int kGridFrom = 64;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_PARTITION_H_
