// Partition: how a bucket is cut into chunks, and a chunk into shards. A pure function of the
// bucket, the world and the options, so all ranks agree without messages; ranks compare its hash.
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

// Chunk offsets within their codec's elements are multiples of this, whatever the codec's block.
inline constexpr size_t kChunkAlignment = 256;

struct Partition {
  // The bucket's segments, grouped by codec. With one codec this is the bucket's order.
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;

  // The elements whose residual on `rank` belongs to the second hop.
  std::vector<Range> SecondHopOf(int rank) const;
  bool keeps_residuals() const;
  uint64_t Hash() const;
};

// An allreduce in chunks of options.chunk_bytes of fp32 (each codec's last one may be shorter, or
// up to a quarter longer) with shards of whole blocks, as even as blocks allow (in a chunk of fewer
// than n blocks some are empty).
Partition MakePartition(std::span<const Segment> segments, int world, const Options& options);

// True if an allreduce of `bytes` raw bytes goes uncompressed.
bool GoesRaw(size_t bytes, int world, const Options& options);

// An allreduce that is exchanged at once, in one hop, outside the order of chunks. In place of an
// announcement and two hops it costs one latency, and (n - 1) times its wire bytes.
struct DirectExchange {
  const Algorithm* algorithm = nullptr;  // null: the tensor goes in chunks
  size_t bytes = 0;                      // that a rank sends to all its peers together
};

// The direct exchange for an allreduce of the segments, which must not be empty.
DirectExchange DirectExchangeOf(std::span<const Segment> segments, DType dtype, int world,
                                const Options& options);

// By hop of an allreduce with options.codecs[0]: its share of the bytes that a chunk sends between
// nodes; 0 for a hop inside nodes. At least one share; their sum is 1.
std::vector<double> HopShares(int world, const Options& options);

// One chunk of all elements in the bucket's order, for algorithms that cut nothing, such as Raw.
Partition MakeWhole(const Algorithm& algorithm, std::span<const Segment> segments, int world);

// A reduce-scatter: each chunk holds the same slice of every rank's part. The segments must have
// one codec, and n must divide their elements.
Partition MakeReduceScatter(std::span<const Segment> segments, int world, const Options& options);
// An all-to-all, cut in the same way.
Partition MakeAllToAll(std::span<const Segment> segments, int world, const Options& options);

// An all-gather of this rank's elements. The segments must have one codec.
Partition MakeAllGather(std::span<const Segment> segments, int world, const Options& options);

// The ranges of the segments with these indices in the order of MakePartition.
std::vector<Range> RangesOf(std::span<const uint32_t> numbers, std::span<const Segment> segments);

// Grid: a world as rows and columns of ranks, for the allreduces of two levels (two_level.cc). Rank
// row * columns + column is at (row, column), so a row holds neighbours, which often share a
// machine; the larger part of the bytes goes along rows. In a hierarchy a row is a node.
//
// A pure function of the world and the options, so all ranks agree without messages.
struct Grid {
  int rows = 1, columns = 1;

  int row(int rank) const { return rank / columns; }
  int column(int rank) const { return rank % columns; }
  int rank(int row, int column) const { return row * columns + column; }
  // The number of the shard that the rank at (row, column) owns. The shards of a column follow one
  // another, so that a column's part of a chunk is one range.
  int shard(int row, int column) const { return column * rows + row; }
  // Messages that a rank sends in the reduce-scatter of a chunk; the all-gather takes as many.
  int messages() const { return rows + columns - 2; }

  // The part of a chunk that a column reduces.
  Range part(const Chunk& chunk, int column) const {
    return {chunk.bounds[column * rows], chunk.bounds[(column + 1) * rows]};
  }
};

// The grid nearest to a square; one row if the world is prime.
Grid GridOf(int world);

// True if options.local_size cuts the world into several nodes of several ranks.
bool HasNodes(int world, const Options& options);

// True if dense allreduces of this world use a grid, according to options.topology; with kAuto,
// from kGridFrom ranks on, unless the grid is so long that it saves less than half of the messages.
bool GoesByGrid(int world, const Options& options);

// True if dense allreduces go by nodes: topology is kHierarchical, and there are nodes. Inside
// nodes they are uncompressed.
bool GoesByNodes(int world, const Options& options);

// The grid in both cases; one row if the world goes flat. With kGrid, nodes (if any) are the rows:
// a rank then sends the fewest bytes between nodes, and encoded bytes inside, too.
Grid GridFor(int world, const Options& options);
// The grid that the chunk's partition was made for.
Grid GridOf(const Chunk& chunk);

// How dense allreduces go, such as "hierarchical: 2 nodes of 2 ranks".
std::string DescribeWay(int world, const Options& options);

// From this many ranks on a flat exchange of a 25 MiB bucket (DDP's) is slower:
// docs/explanation/scale.md.
inline constexpr int kGridFrom = 64;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_PARTITION_H_
