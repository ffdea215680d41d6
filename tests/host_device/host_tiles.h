// Runs the tiles of a launch on the host, one after the other.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_TILES_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_TILES_H_

#include "tests/host_device/host_team.h"

namespace thinwire::kernels {

// Calls tile(team, shared, t) for each tile with a team of `threads`, from the last to the first,
// since no tile may rely on an order. Registers and shared memory start uninitialised, as on a GPU.
template <typename Shared, typename Tile>
void ForEachTile(uint32_t tiles, unsigned threads, Tile tile) {
  for (uint32_t t = tiles; t > 0; --t) {
    HostTeam team(threads);
    Shared shared;
    tile(team, shared, t - 1);
  }
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_TILES_H_
