// Grid: a world as rows and columns of ranks, for the allreduces of two levels (two_level.cc). Rank
// row * columns + column stands at (row, column), so a row holds neighbours, which often share a
// machine; what goes along rows is the larger part of the bytes. In a hierarchy a row is a node.
//
// A pure function of the world and the options, so that all ranks agree without a word.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_GRID_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_GRID_H_

#include <string>

#include "compress/error_feedback.h"
#include "schedule/collective/partition.h"
#include "schedule/options.h"

namespace thinwire {

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

// True if dense allreduces of this world go by its grid: as options.topology says; if that is
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

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_GRID_H_
