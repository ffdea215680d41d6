// Launches on the host, as a GPU would run them: tile after tile and thread after thread.
#include "kernels/dispatch.h"
#include "kernels/host_device.h"
#include "kernels/host_tiles.h"
#include "kernels/tiles.h"

namespace thinwire::kernels {
namespace {

struct Nothing {};

}  // namespace

void RunOnHost(const EncodeLaunch& launch) {
  ForCodec(launch.codec, [&](auto traits) {
    ForDType(launch.dtype, [&](auto dtype) {
      using Traits = decltype(traits);
      ForEachTile<EncoderShared<HostTeam, Traits>>(
          launch.jobs.tiles, [&](HostTeam& team, auto& shared, uint32_t tile) {
            EncodeTile<HostTeam, Traits, dtype()>(team, shared, launch, tile);
          });
    });
  });
}

void RunOnHost(const DecodeLaunch& launch) {
  ForCodec(launch.codec, [&](auto traits) {
    ForDType(launch.dtype, [&](auto dtype) {
      ForEachTile<Nothing>(launch.jobs.tiles, [&](HostTeam& team, Nothing&, uint32_t tile) {
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
    ForEachTile<Nothing>(launch.jobs.tiles, [&](HostTeam& team, Nothing&, uint32_t tile) {
      AccumulateTile<HostTeam, dtype()>(team, launch, tile);
    });
  });
}

void RunOnHost(const CopyFiniteLaunch& launch) {
  ForEachTile<Nothing>(launch.jobs.tiles, [&](HostTeam& team, Nothing&, uint32_t tile) {
    CopyFiniteTile(team, launch, tile);
  });
}

void RunOnHost(const ReduceLaunch& launch) {
  ForCodec(launch.down, [&](auto down) {
    ForDType(launch.dtype, [&](auto dtype) {
      using Down = decltype(down);
      ForEachTile<EncoderShared<HostTeam, Down>>(
          launch.jobs.tiles, [&](HostTeam& team, auto& shared, uint32_t tile) {
            ReduceTile<HostTeam, Down, dtype()>(team, shared, launch, tile);
          });
    });
  });
}

}  // namespace thinwire::kernels
