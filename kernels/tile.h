// Tile: the elements that one team of threads works on, and which thread holds which of them.
//
// A tile is 4096 elements, the largest block, so that every block lies in one tile whatever its
// size. A warp holds kQuads groups of 128 elements; within a group lane l holds elements 4 l to
// 4 l + 3. So loads of fp32 are 16 bytes a lane and 512 contiguous bytes a warp, and the codes of a
// quad are one word. A group is the smallest block: no two blocks share one.
#ifndef THINWIRE_KERNELS_TILE_H_
#define THINWIRE_KERNELS_TILE_H_

#include <cstddef>

#include "compress/codec_traits.h"
#include "compress/hd.h"
#include "kernels/tuning.h"

// Stands before a loop whose body is long.
#ifdef __CUDA_ARCH__
#define THINWIRE_ROLL _Pragma("unroll 1")
#else
#define THINWIRE_ROLL
#endif

namespace thinwire::kernels {

inline constexpr unsigned kTile = kThreads * kQuads * kQuad;
inline constexpr unsigned kGroup = kWarp * kQuad;
inline constexpr unsigned kGroups = kTile / kGroup;
static_assert(kTile % kMaxBlock == 0 && kGroup <= kMinBlock, "every block lies in one tile");

// The elements that a thread holds, quad after quad.
struct Values {
  float v[kQuads * kQuad];
};

THINWIRE_HD void CopyQuad(const Values& from, unsigned quad, Values& to) {
  THINWIRE_UNROLL
  for (unsigned i = 0; i < kQuad; ++i) to.v[quad * kQuad + i] = from.v[quad * kQuad + i];
}

// The place in the tile of the first element of a thread's quad.
THINWIRE_HD unsigned PlaceOf(unsigned thread, unsigned quad) {
  return (thread / kWarp * kQuads + quad) * kGroup + thread % kWarp * kQuad;
}

// A tile of a shard of `numel` elements.
struct TileRange {
  size_t begin;  // a multiple of kTile
  size_t numel;  // of the shard

  THINWIRE_HD bool last() const { return begin + kTile >= numel; }
  THINWIRE_HD bool full() const { return begin + kTile <= numel; }
  THINWIRE_HD size_t end() const { return last() ? numel : begin + kTile; }
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TILE_H_
