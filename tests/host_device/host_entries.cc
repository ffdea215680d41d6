// topk's launches on the host, one kernel after the other.
#include <vector>

#include "kernels/entry_adder.h"
#include "kernels/entry_encoder.h"
#include "tests/host_device/host_device.h"
#include "tests/host_device/host_tiles.h"

namespace thinwire::kernels {

void RunOnHost(const EncodeEntriesLaunch& given) {
  if (given.tiles == 0) return;
  EncodeEntriesLaunch launch = given;
  std::vector<uint8_t> own(given.room.state == nullptr ? RoomOf(given) : 0);
  if (!own.empty()) PutRoom(launch, own.data());
  // Runs one kernel: calls work(encoder, number) for each of its teams.
  const auto run = [&](uint32_t tiles, auto work) {
    ForEachTile<EntryShared<HostTeam>>(tiles, kThreads,
                                       [&](HostTeam& team, auto& shared, uint32_t tile) {
                                         work(EntryEncoder<HostTeam>(team, shared, launch), tile);
                                       });
  };
  run(1, [](auto encoder, uint32_t) { encoder.Begin(); });
  run(launch.tiles, [](auto encoder, uint32_t tile) { encoder.Scan(tile); });
  for (unsigned digit = 0; digit < kDigits; ++digit) {
    run(EntryTeams(launch.tiles),
        [&](auto encoder, uint32_t team) { encoder.CountDigits(team, digit); });
  }
  run(GroupsOf(launch.tiles), [](auto encoder, uint32_t group) { encoder.Count(group); });
  run(EntryTeams(launch.tiles), [](auto encoder, uint32_t team) { encoder.Send(team); });
}

void RunOnHost(const AddEntriesLaunch& launch) {
  ForEachTile<AdderShared<HostTeam>>(launch.tiles, kThreads,
                                     [&](HostTeam& team, auto& shared, uint32_t tile) {
                                       EntryAdder<HostTeam>(team, shared, launch, tile).Run();
                                     });
}

}  // namespace thinwire::kernels
