// The plan of a shard, by one team: FORMAT.md's threshold, by bisection over sums of whole numbers,
// and which blocks take the one below.
#ifndef THINWIRE_KERNELS_WIDTHS_PLAN_H_
#define THINWIRE_KERNELS_WIDTHS_PLAN_H_

#include "kernels/team_sum.h"
#include "kernels/widths.h"
#include "kernels/word.h"

namespace thinwire::kernels {

template <typename Team>
class ShardPlanner {
  using Counts = typename Team::template PerThread<uint32_t>;

 public:
  THINWIRE_HD ShardPlanner(Team& team, SumShared<Team>& shared, const Codec& codec,
                           const uint8_t* wire, uint32_t blocks)
      : team_(team),
        shared_(shared),
        floor_(static_cast<int>(codec.floor)),
        wire_(wire),
        blocks_(blocks),
        each_(BlocksPerMark(blocks)),
        budget_(static_cast<uint32_t>(AdaptivePlanes(codec.sixteenths, blocks))) {}

  THINWIRE_HD void Run(WidthsPlan* plan) {
    const int threshold = Threshold();
    Counts planes, raises;
    team_.ForEach([&](unsigned thread) {
      planes[thread] = PlanesAt(thread, threshold);
      raises[thread] = PlanesAt(thread, threshold - 1) - planes[thread];
    });
    Counts own = raises;
    const uint32_t all_planes = SumBefore(planes), all_raises = SumBefore(raises);
    const uint32_t left = budget_ - all_planes;
    team_.ForEach([&](unsigned thread) {
      const uint32_t before = raises[thread];
      plan->before[thread] = planes[thread] + Smaller(before, left);
      if (before <= left && left < before + own[thread]) {
        plan->raised = BlockOfRaise(thread, threshold, left - before);
      }
      if (thread != 0) return;
      plan->threshold = threshold;
      plan->planes = all_planes + Smaller(all_raises, left);
      if (all_raises <= left) plan->raised = blocks_;
    });
  }

 private:
  THINWIRE_HD static uint32_t Smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

  // The smallest one that fits. The floor fits, so the highest does, whatever the heads are.
  THINWIRE_HD int Threshold() {
    int low = kLowestThreshold, high = kHighestThreshold;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      Counts planes;
      team_.ForEach([&](unsigned thread) { planes[thread] = PlanesAt(thread, middle); });
      if (SumBefore(planes) <= budget_) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Calls visit(head, block) for the blocks of a thread, which are neighbours, until it says false.
  template <typename Visit>
  THINWIRE_HD void ForEachHead(unsigned thread, Visit visit) const {
    constexpr unsigned kAtOnce = 16 / sizeof(uint16_t);
    const uint32_t begin = thread * each_;
    const uint32_t end = begin + each_ < blocks_ ? begin + each_ : blocks_;
    for (uint32_t block = begin; block < end; block += kAtOnce) {
      alignas(16)
          uint16_t heads[kAtOnce];  // those behind the last one are padding, and not looked at
      CopyWord<sizeof(heads)>(heads, wire_ + size_t{block} * sizeof(uint16_t));
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (block + i < end) visit(heads[i], block + i);
      }
    }
  }

  THINWIRE_HD uint32_t PlanesAt(unsigned thread, int threshold) const {
    uint32_t planes = 0;
    ForEachHead(thread, [&](uint16_t head, uint32_t) {
      planes += static_cast<uint32_t>(AdaptiveWidth(head, threshold, floor_));
    });
    return planes;
  }

  // The block of a thread that has raise number `nth` of it: a threshold less by one raises a width
  // by one or not at all.
  THINWIRE_HD uint32_t BlockOfRaise(unsigned thread, int threshold, uint32_t nth) const {
    uint32_t found = 0, raises = 0;
    ForEachHead(thread, [&](uint16_t head, uint32_t block) {
      if (AdaptiveWidth(head, threshold - 1, floor_) == AdaptiveWidth(head, threshold, floor_)) {
        return;
      }
      if (raises++ == nth) found = block;
    });
    return found;
  }

  // Leaves in each thread the sum of the threads before it, and returns that of all.
  THINWIRE_HD uint32_t SumBefore(Counts& count) {
    Counts all;
    ExclusiveSum(team_, shared_, count, all);
    return all[0];  // of any thread: it is the same in all
  }

  Team& team_;
  SumShared<Team>& shared_;
  const int floor_;
  const uint8_t* const wire_;
  const uint32_t blocks_, each_, budget_;
};

template <typename Team>
THINWIRE_HD void PlanShard(Team& team, SumShared<Team>& shared, const PlanLaunch& launch,
                           WidthsPlan* plans, uint32_t shard) {
  const PlanJob& job = launch.job[shard];
  ShardPlanner<Team>(team, shared, launch.codec, job.wire, job.blocks).Run(plans + shard);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_PLAN_H_
