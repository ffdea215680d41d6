// Codecs of widths (compress/FORMAT.md, "adaptive") on a device: what lies where. A block's width,
// and the place of its codes, follow from the heads of all blocks of its shard. So an encoding is
// three launches: heads; a plan of each shard (widths_plan.h); codes. A decoding is the last two.
#ifndef THINWIRE_KERNELS_WIDTHS_H_
#define THINWIRE_KERNELS_WIDTHS_H_

#include "compress/codecs/adaptive.h"
#include "kernels/jobs.h"
#include "kernels/tile.h"
#include "kernels/transform.h"

namespace thinwire::kernels {

inline constexpr unsigned kTileBlocks = kTile / kTransform;

// A thread holds a part of two blocks, those of its warp.
inline constexpr unsigned kParts = kQuads / kTransformQuads;
inline constexpr unsigned kPartElements = kTransformQuads * kQuad;

// The number in the tile of the block that a part belongs to.
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

// The place of codes as all heads of a shard give it, in device memory.
struct WidthsPlan {
  int threshold;              // of the widths
  uint32_t raised;            // blocks before this one take the threshold below
  uint32_t planes;            // of all blocks together
  uint32_t before[kThreads];  // planes before block i * BlocksPerMark(...)
};

// Whole tiles, so that teams of most shards find the planes before their tile without a sum.
THINWIRE_HD uint32_t BlocksPerMark(uint32_t blocks) {
  const uint32_t tiles = (blocks + kTileBlocks - 1) / kTileBlocks;
  return (tiles + kThreads - 1) / kThreads * kTileBlocks;
}

// The plans of several shards, whose heads are there.
struct PlanJob {
  const uint8_t* wire;
  uint32_t blocks;
};
struct PlanLaunch {
  Codec codec;
  uint32_t count;
  PlanJob job[kMaxJobs];
};

// Those of the shards of an EncodeLaunch or a DecodeLaunch, by job.
template <typename Launch>
PlanLaunch PlansOf(const Launch& launch) {
  PlanLaunch plans{.codec = launch.codec, .count = launch.jobs.count, .job = {}};
  for (uint32_t i = 0; i < plans.count; ++i) {
    plans.job[i] = {launch.jobs.job[i].wire.data, BlocksOf(launch.jobs.job[i].numel)};
  }
  return plans;
}

// Bytes of a launch's room: its plans.
template <typename Launch>
size_t RoomOf(const Launch& launch) {
  return HasWidths(launch.codec) ? launch.jobs.count * sizeof(WidthsPlan) : 0;
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_H_
