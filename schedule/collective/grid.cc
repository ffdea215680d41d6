#include "schedule/collective/grid.h"

#include "absl/strings/str_cat.h"

namespace thinwire {

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
