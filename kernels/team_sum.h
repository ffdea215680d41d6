// Collectives of a team: sums over its threads, and whether it is the last of its kernel to finish.
#ifndef THINWIRE_KERNELS_TEAM_SUM_H_
#define THINWIRE_KERNELS_TEAM_SUM_H_

#include "kernels/tile.h"

namespace thinwire::kernels {

template <typename Team>
struct SumShared {
  typename Team::template Shared<uint32_t, kThreads / kWarp> warps;
  typename Team::template Shared<uint32_t, 1> last;
};

// Sets each thread's `value` to the sum over the lower lanes of its warp, and `all` to the sum over
// all lanes.
template <typename Team>
THINWIRE_HD void WarpExclusiveSum(Team& team, typename Team::template PerThread<uint32_t>& value,
                                  typename Team::template PerThread<uint32_t>& all) {
  typename Team::template PerThread<uint32_t> other;
  team.ForEach([&](unsigned thread) {
    all[thread] = value[thread];
    value[thread] = 0;
  });
  // `all` is the sum of ever larger groups of lanes; the neighbour group is before or after.
  THINWIRE_UNROLL
  for (unsigned mask = 1; mask < kWarp; mask *= 2) {
    team.Exchange(all, mask, other);
    team.ForEach([&](unsigned thread) {
      if (thread & mask) value[thread] += other[thread];
      all[thread] += other[thread];
    });
  }
}

// Converts a warp's sum, which all its lanes have, to the sum over the warps before it; `all` is
// the sum over all warps.
template <typename Team>
THINWIRE_HD void AddWarpsBefore(Team& team, SumShared<Team>& shared,
                                typename Team::template PerThread<uint32_t>& warp,
                                typename Team::template PerThread<uint32_t>& all) {
  team.ForEach([&](unsigned thread) {
    if (thread % kWarp == 0) shared.warps.Put(team, thread, thread / kWarp, warp[thread]);
  });
  team.Sync();
  team.ForEach([&](unsigned thread) {
    all[thread] = warp[thread] = 0;
    THINWIRE_UNROLL
    for (unsigned w = 0; w < kThreads / kWarp; ++w) {
      const uint32_t sum = shared.warps.Get(team, thread, w);
      all[thread] += sum;
      if (w < thread / kWarp) warp[thread] += sum;
    }
  });
  team.Sync();
}

// Like WarpExclusiveSum, over all threads of a team.
template <typename Team>
THINWIRE_HD void ExclusiveSum(Team& team, SumShared<Team>& shared,
                              typename Team::template PerThread<uint32_t>& value,
                              typename Team::template PerThread<uint32_t>& all) {
  typename Team::template PerThread<uint32_t> warp;
  WarpExclusiveSum(team, value, warp);
  AddWarpsBefore(team, shared, warp, all);
  team.ForEach([&](unsigned thread) { value[thread] += warp[thread]; });
}

// True in the last of `teams` teams to call it, which may read what the others have written by
// Team::Fresh. `finished` counts them, from 0.
template <typename Team>
THINWIRE_HD bool IsLastTeam(Team& team, SumShared<Team>& shared, uint32_t* finished,
                            uint32_t teams) {
  team.Sync();
  team.ForEach([&](unsigned thread) {
    if (thread != 0) return;
    Team::Fence();
    shared.last.Put(team, thread, 0, Team::AtomicAdd(finished, 1) + 1 == teams);
    Team::Fence();
  });
  team.Sync();
  bool last = false;
  team.ForEach([&](unsigned thread) { last = shared.last.Get(team, thread, 0) != 0; });
  return last;
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_TEAM_SUM_H_
