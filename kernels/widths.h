// Codecs of widths (compress/FORMAT.md, "adaptive") on a device: layout. A block's width, and the
// place of its codes, depend on the heads of all blocks of its shard. So an encoding is three
// launches: heads; a plan of each shard (widths_plan.h); codes. A decoding is the last two.
#ifndef THINWIRE_KERNELS_WIDTHS_H_
#define THINWIRE_KERNELS_WIDTHS_H_

#include "compress/codecs/adaptive.h"
#include "kernels/jobs.h"
#include "kernels/tile.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

inline constexpr unsigned kTileBlocks = kTile / kTransform;

// Each thread holds a part of two blocks of its warp.
inline constexpr unsigned kParts = kQuads / kTransformQuads;
inline constexpr unsigned kPartElements = kTransformQuads * kQuad;

// The index in the tile of a part's block.
THINWIRE_HD unsigned BlockOfPart(unsigned thread, unsigned part) {
  return thread / kWarp * kParts + part;
}

THINWIRE_HD uint32_t BlocksOf(size_t numel) {
  return static_cast<uint32_t>((numel + kTransform - 1) / kTransform);
}

THINWIRE_HD uint32_t FirstBlockOf(const TileRange& tile) {
  return static_cast<uint32_t>(tile.begin / kTransform);
}

THINWIRE_HD bool HasWidths(const Codec& codec) { return codec.sixteenths != 0; }

// Where the codes of a shard lie, computed from all its heads; in device memory.
struct WidthsPlan {
  int threshold;              // for the widths
  uint32_t raised;            // for blocks before this one it is lower by 1
  uint32_t planes;            // total over all blocks
  uint32_t before[kThreads];  // planes before block i * BlocksPerMark(...)
};

// A multiple of whole tiles, so that for most shards teams find the planes before their tile
// without a sum.
THINWIRE_HD uint32_t BlocksPerMark(uint32_t blocks) {
  const uint32_t tiles = (blocks + kTileBlocks - 1) / kTileBlocks;
  return (tiles + kThreads - 1) / kThreads * kTileBlocks;
}

// The plans of several shards, whose heads are written.
struct PlanJob {
  const uint8_t* wire;
  uint32_t blocks;
};
struct PlanLaunch {
  Codec codec;
  uint32_t count;
  PlanJob job[kMaxJobs];
};

// The plans of the shards of an EncodeLaunch or a DecodeLaunch, by job.
template <typename Launch>
PlanLaunch PlansOf(const Launch& launch) {
  PlanLaunch plans{.codec = launch.codec, .count = launch.jobs.count, .job = {}};
  for (uint32_t i = 0; i < plans.count; ++i) {
    plans.job[i] = {launch.jobs.job[i].wire.data, BlocksOf(launch.jobs.job[i].numel)};
  }
  return plans;
}

// Bytes of a launch's room, for its plans.
template <typename Launch>
size_t RoomOf(const Launch& launch) {
  return HasWidths(launch.codec) ? launch.jobs.count * sizeof(WidthsPlan) : 0;
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_H_
