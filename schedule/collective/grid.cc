#include "schedule/collective/grid.h"

namespace thinwire {

Grid GridOf(int world) {
  Grid grid{1, world};
  for (int rows = 2; rows * rows <= world; ++rows) {
    if (world % rows == 0) grid = {rows, world / rows};
  }
  return grid;
}

bool GoesByGrid(int world, const Options& options) {
  const Grid grid = GridOf(world);
  switch (options.topology) {
    case Topology::kFlat: return false;
    case Topology::kGrid: return grid.rows > 1;
    case Topology::kAuto: break;
  }
  return world >= kGridFrom && 2 * grid.messages() < world - 1;
}

}  // namespace thinwire
