// The ranks of what is marked in a tile, in the order of elements.
#ifndef THINWIRE_KERNELS_QUAD_RANKS_H_
#define THINWIRE_KERNELS_QUAD_RANKS_H_

#include "kernels/team_sum.h"

namespace thinwire::kernels {

// A number for each quad of a thread.
struct QuadCounts {
  uint32_t v[kQuads];
};

template <typename Team>
struct QuadShared {
  typename Team::template Shared<uint32_t, kTile / kQuad> quads;
};

// From counts of each quad to those of all quads before it, in the order of elements;
// `all` is their sum.
template <typename Team>
THINWIRE_HD void RankQuads(Team& team, QuadShared<Team>& shared, SumShared<Team>& sums,
                           typename Team::template PerThread<QuadCounts>& counts,
                           typename Team::template PerThread<uint32_t>& all) {
  typename Team::template PerThread<uint32_t> before;
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      shared.quads.Put(team, thread, PlaceOf(thread, q) / kQuad, counts[thread].v[q]);
    }
  });
  team.Sync();
  team.ForEach([&](unsigned thread) {
    before[thread] = 0;
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuads; ++i) {
      before[thread] += shared.quads.Get(team, thread, thread * kQuads + i);
    }
  });
  ExclusiveSum(team, sums, before, all);
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned i = 0; i < kQuads; ++i) {
      const unsigned quad = thread * kQuads + i;
      const uint32_t count = shared.quads.Get(team, thread, quad);
      shared.quads.Put(team, thread, quad, before[thread]);
      before[thread] += count;
    }
  });
  team.Sync();
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      counts[thread].v[q] = shared.quads.Get(team, thread, PlaceOf(thread, q) / kQuad);
    }
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_QUAD_RANKS_H_
