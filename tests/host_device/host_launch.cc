// Launches on the host, as a GPU would run them: tile by tile and thread by thread.
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/reduce_parts.h"
#include "kernels/tile_reducer.h"
#include "kernels/widths_plan.h"
#include "kernels/widths_tiles.h"
#include "tests/host_device/host_device.h"
#include "tests/host_device/host_tiles.h"

namespace thinwire::kernels {
namespace {

struct Nothing {};

// The codecs with widths: the launches of cuda_widths.cu, in the same order.

// The launch's room, or memory of its own if the launch has none.
class Room {
 public:
  template <typename Launch>
  explicit Room(const Launch& launch)
      : given_(launch.room), own_(given_ == nullptr ? RoomOf(launch) : 0) {}
  uint8_t* data() { return given_ != nullptr ? given_ : own_.data(); }

 private:
  uint8_t* const given_;
  std::vector<uint8_t> own_;
};

template <typename Launch>
const WidthsPlan* MakePlans(const Launch& launch, Room& room) {
  auto* const plans = reinterpret_cast<WidthsPlan*>(room.data());
  const PlanLaunch shards = PlansOf(launch);
  ForEachTile<PlanShared<HostTeam>>(shards.count, kThreads,
                                    [&](HostTeam& team, auto& shared, uint32_t shard) {
                                      PlanShard(team, shared, shards, plans, shard);
                                    });
  return plans;
}

void EncodeWidths(const EncodeLaunch& launch) {
  if (launch.jobs.tiles == 0) return;  // a GPU would only load the code
  ForDType(launch.dtype, [&](auto dtype) {
    ForEachTile<HeadsShared<HostTeam>>(
        launch.jobs.tiles, kThreads, [&](HostTeam& team, auto& shared, uint32_t tile) {
          EncodeHeadsTile<HostTeam, dtype()>(team, shared, launch, tile);
        });
    Room room(launch);
    const WidthsPlan* const plans = MakePlans(launch, room);
    ForEachTile<Nothing>(launch.jobs.tiles, kThreads, [&](HostTeam& team, Nothing&, uint32_t tile) {
      EncodeCodesTile<HostTeam, dtype()>(team, launch, plans, tile);
    });
  });
}

void DecodeWidths(const DecodeLaunch& launch) {
  if (launch.jobs.tiles == 0) return;
  Room room(launch);
  const WidthsPlan* const plans = MakePlans(launch, room);
  ForDType(launch.dtype, [&](auto dtype) {
    ForEachTile<Nothing>(launch.jobs.tiles, kThreads, [&](HostTeam& team, Nothing&, uint32_t tile) {
      if (launch.add) {
        DecodeWidthsTile<HostTeam, DType::kF32, true>(team, launch, plans, tile);
      } else {
        DecodeWidthsTile<HostTeam, dtype(), false>(team, launch, plans, tile);
      }
    });
  });
}

void ReduceAsParts(const ReduceLaunch& launch) {
  Room room(launch);
  ReduceInParts(launch, room.data(), [](const auto& part) { RunOnHost(part); });
}

}  // namespace

void RunOnHost(const EncodeLaunch& launch) {
  if (HasWidths(launch.codec)) return EncodeWidths(launch);
  ForCodec(launch.codec, [&](auto traits) {
    ForDType(launch.dtype, [&](auto dtype) {
      using Traits = decltype(traits);
      ForEachTile<EncoderShared<HostTeam, Traits>>(
          launch.jobs.tiles, launch.jobs.threads, [&](HostTeam& team, auto& shared, uint32_t tile) {
            EncodeTile<HostTeam, Traits, dtype()>(team, shared, launch, tile);
          });
    });
  });
}

void RunOnHost(const DecodeLaunch& launch) {
  if (HasWidths(launch.codec)) return DecodeWidths(launch);
  ForCodec(launch.codec, [&](auto traits) {
    ForDType(launch.dtype, [&](auto dtype) {
      ForEachTile<Nothing>(
          launch.jobs.tiles, launch.jobs.threads, [&](HostTeam& team, Nothing&, uint32_t tile) {
            if (launch.add) {
              DecodeTile<HostTeam, decltype(traits), DType::kF32, true>(team, launch, tile);
            } else {
              DecodeTile<HostTeam, decltype(traits), dtype(), false>(team, launch, tile);
            }
          });
    });
  });
}

void RunOnHost(const AccumulateLaunch& launch) {
  ForDType(launch.dtype, [&](auto dtype) {
    ForEachTile<Nothing>(launch.jobs.tiles, launch.jobs.threads,
                         [&](HostTeam& team, Nothing&, uint32_t tile) {
                           AccumulateTile<HostTeam, dtype()>(team, launch, tile);
                         });
  });
}

void RunOnHost(const MomentumLaunch& launch) {
  ForEachTile<Nothing>(
      launch.jobs.tiles, launch.jobs.threads,
      [&](HostTeam& team, Nothing&, uint32_t tile) { EndMomentumTile(team, launch, tile); });
}

void RunOnHost(const ReduceLaunch& launch) {
  if (IsInParts(launch)) return ReduceAsParts(launch);
  ForReduction(launch, [&](auto up, auto down, auto dtype) {
    using Up = decltype(up);
    using Down = decltype(down);
    ForEachTile<ReduceShared<HostTeam, Up, Down>>(
        launch.tiles, launch.threads, [&](HostTeam& team, auto& shared, uint32_t tile) {
          ReduceTile<HostTeam, Up, Down, dtype()>(team, shared, launch, tile);
        });
  });
}

}  // namespace thinwire::kernels
