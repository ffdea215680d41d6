// EntryOffsets: computes where the entries of each group of tiles go, from the groups' counts, and
// writes the head of the wire bytes. Runs in one team once all groups are counted.
#ifndef THINWIRE_KERNELS_ENTRY_OFFSETS_H_
#define THINWIRE_KERNELS_ENTRY_OFFSETS_H_

#include "compress/codecs/topk.h"
#include "kernels/entry_jobs.h"
#include "kernels/team_sum.h"

namespace thinwire::kernels {

template <typename Team>
class EntryOffsets {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;

 public:
  THINWIRE_HD EntryOffsets(Team& team, SumShared<Team>& sums, const EncodeEntriesLaunch& launch)
      : team_(team), sums_(sums), launch_(launch) {}

  THINWIRE_HD void Run() {
    SumGroups();
    team_.Sync();
    team_.ForEach([&](unsigned thread) { PutHead(thread); });
  }

 private:
  // Converts a group's own counts to those of all earlier groups.
  THINWIRE_HD void SumGroups() {
    const uint32_t groups = GroupsOf(launch_.tiles);
    PerThread<uint32_t> above, equal, above_all, equal_all, above_before, equal_before;
    team_.ForEach([&](unsigned thread) { above_before[thread] = equal_before[thread] = 0; });
    for (uint32_t first = 0; first < groups; first += kThreads) {
      team_.ForEach([&](unsigned thread) {
        const bool any = first + thread < groups;
        const EntryGroup* const group = launch_.room.groups + first + thread;
        above[thread] = any ? Team::Fresh(&group->above) : 0;
        equal[thread] = any ? Team::Fresh(&group->equal) : 0;
      });
      ExclusiveSum(team_, sums_, above, above_all);
      ExclusiveSum(team_, sums_, equal, equal_all);
      team_.ForEach([&](unsigned thread) {
        if (first + thread < groups) {
          EntryGroup& group = launch_.room.groups[first + thread];
          group.above = above_before[thread] + above[thread];
          group.equal = equal_before[thread] + equal[thread];
        }
        above_before[thread] += above_all[thread];
        equal_before[thread] += equal_all[thread];
      });
    }
  }

  // Entries of all earlier sub-blocks.
  THINWIRE_HD uint32_t EntriesBefore(size_t sub_block) const {
    const size_t tile = sub_block * (kSubBlock / kTile);
    if (tile >= launch_.tiles) return launch_.entries;
    const EntryTile* const note = launch_.room.tiles + tile;
    const EntryGroup* const group = launch_.room.groups + tile / kGroupTiles;
    const uint32_t equal = Team::Fresh(&group->equal) + Team::Fresh(&note->equal);
    const uint32_t wanted = launch_.room.state->wanted;
    return Team::Fresh(&group->above) + Team::Fresh(&note->above) +
           (equal < wanted ? equal : wanted);
  }

  // The counts of all sub-blocks, and the padding after them and after the entries.
  THINWIRE_HD void PutHead(unsigned thread) {
    auto* const head = reinterpret_cast<uint32_t*>(launch_.wire.data);
    const size_t words = launch_.wire.bytes / sizeof(uint32_t);
    const size_t entries_at = launch_.wire.codes_at / sizeof(uint32_t);
    for (size_t b = thread; b < entries_at; b += kThreads) {
      head[b] = EntriesBefore(b + 1) - EntriesBefore(b);
    }
    const size_t behind = entries_at + launch_.entries + thread;
    if (behind < words) head[behind] = 0;
  }

  Team& team_;
  SumShared<Team>& sums_;
  const EncodeEntriesLaunch& launch_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_OFFSETS_H_
