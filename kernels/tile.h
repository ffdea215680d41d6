// Tile: the elements that one team of threads works on, and how its threads share them.
//
// A tile is 4096 elements, the largest block, so every block lies in one tile. A launch of few
// elements has smaller tiles, for teams with fewer threads, but never smaller than a block
// (TeamThreads). A warp holds kQuads groups of 128 elements; lane l of a group holds its elements
// 4 l to 4 l + 3. So fp32 loads are 16 bytes per lane and 512 contiguous bytes per warp, and the
// codes of a quad are one word. A group is the smallest block: no two blocks share a group.
#ifndef THINWIRE_KERNELS_TILE_H_
#define THINWIRE_KERNELS_TILE_H_

#include <cstddef>

#include "compress/element_math.h"
#include "compress/types.h"
#include "kernels/tuning.h"

// Precedes a loop whose body is long.
#ifdef __CUDA_ARCH__
#define THINWIRE_ROLL _Pragma("unroll 1")
#else
#define THINWIRE_ROLL
#endif

namespace thinwire::kernels {

inline constexpr unsigned kTile = kThreads * kQuads * kQuad;
inline constexpr unsigned kGroup = kWarp * kQuad;
inline constexpr unsigned kGroups = kTile / kGroup;
inline constexpr unsigned kWarpElements = kQuads * kGroup;
static_assert(kTile % kMaxBlock == 0 && kGroup <= kMinBlock, "every block lies in one tile");

// The elements that a thread holds, quad after quad.
struct Values {
  float v[kQuads * kQuad];
};

THINWIRE_HD void CopyQuad(const Values& from, unsigned quad, Values& to) {
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) to.v[quad * kQuad + i] = from.v[quad * kQuad + i];
}

// The index in the tile of the first element of a thread's quad.
THINWIRE_HD unsigned PlaceOf(unsigned thread, unsigned quad) {
  return (thread / kWarp * kQuads + quad) * kGroup + thread % kWarp * kQuad;
}

// The number of elements in the tile of a team.
THINWIRE_HD constexpr unsigned TileOf(unsigned threads) { return threads * kQuads * kQuad; }

// Threads per team of a launch over `elements` elements in blocks of at most `block`: enough for a
// full tile, but fewer if there would be too few tiles to fill a GPU.
inline unsigned TeamThreads(size_t elements, size_t block) {
  unsigned threads = kThreads;
  while (threads > kFewestThreads && elements < size_t{kTilesToFill} * TileOf(threads) &&
         TileOf(threads / 2) >= block) {
    threads /= 2;
  }
  return threads;
}

// A tile of a shard of `numel` elements.
struct TileRange {
  size_t begin;           // a multiple of `size`
  size_t numel;           // of the shard
  unsigned size = kTile;  // TileOf(the team's threads)

  THINWIRE_HD bool last() const { return begin + size >= numel; }
  THINWIRE_HD bool full() const { return begin + size <= numel; }
  THINWIRE_HD size_t end() const { return last() ? numel : begin + size; }
  // The index in the shard of the first element of a thread's quad. Quads are a constant distance
  // apart, so that they share one address.
  THINWIRE_HD size_t Place(unsigned thread, unsigned quad) const {
    return begin + PlaceOf(thread, 0) + quad * kGroup;
  }
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_H_
