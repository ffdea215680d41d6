// The ranks of marked elements in a tile, in the order of elements.
#ifndef THINWIRE_KERNELS_QUAD_RANKS_H_
#define THINWIRE_KERNELS_QUAD_RANKS_H_

#include "kernels/team_sum.h"

namespace thinwire::kernels {

// A number for each quad of a thread.
struct QuadCounts {
  uint32_t v[kQuads];
};

// Converts marks, where bit k is a thread's item k, to the number of marks before each of its
// quads, in the order of elements; `all` is the total. A warp's counts of all quads are summed at
// once, one byte per quad.
template <typename Team>
THINWIRE_HD void RankMarks(Team& team, SumShared<Team>& sums,
                           typename Team::template PerThread<uint32_t>& marks,
                           typename Team::template PerThread<QuadCounts>& ranks,
                           typename Team::template PerThread<uint32_t>& all) {
  constexpr unsigned kByte = 8;
  static_assert(kQuads * kByte <= 32 && kWarp * kQuad < 1u << kByte);
  typename Team::template PerThread<uint32_t> before, warp;
  team.ForEach([&](unsigned thread) {
    before[thread] = 0;
    THINWIRE_UNROLL
    for (unsigned k = 0; k < kQuads * kQuad; ++k) {
      before[thread] += (marks[thread] >> k & 1) << (k / kQuad * kByte);
    }
  });
  WarpExclusiveSum(team, before, warp);
  team.ForEach([&](unsigned thread) {
    uint32_t sum = 0;
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) {
      ranks[thread].v[q] = sum + (before[thread] >> (q * kByte) & 0xff);
      sum += warp[thread] >> (q * kByte) & 0xff;
    }
    warp[thread] = sum;
  });
  AddWarpsBefore(team, sums, warp, all);
  team.ForEach([&](unsigned thread) {
    THINWIRE_UNROLL
    for (unsigned q = 0; q < kQuads; ++q) ranks[thread].v[q] += warp[thread];
  });
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_QUAD_RANKS_H_
