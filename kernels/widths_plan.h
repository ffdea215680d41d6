// The plan of a shard, made by one team: FORMAT.md's threshold, from a histogram of the heads, and
// how many blocks, from the first on, use the next lower threshold.
#ifndef THINWIRE_KERNELS_WIDTHS_PLAN_H_
#define THINWIRE_KERNELS_WIDTHS_PLAN_H_

#include "kernels/team_sum.h"
#include "kernels/widths.h"
#include "kernels/word.h"

namespace thinwire::kernels {

// A head's exponent determines a width, and its fraction may lower it by one.
inline constexpr unsigned kFractionBits = 7, kFractions = 1u << kFractionBits;
inline constexpr int kExponents = kFirstNonFiniteHead >> kFractionBits;
static_assert(kExponents < int{kThreads} && kFractions <= kThreads, "a thread has a bin");

template <typename Team>
struct PlanShared {
  SumShared<Team> sums;
  typename Team::template Shared<uint32_t, kThreads> bins;
};

template <typename Team>
class ShardPlanner {
  using Counts = typename Team::template PerThread<uint32_t>;

 public:
  THINWIRE_HD ShardPlanner(Team& team, PlanShared<Team>& shared, const Codec& codec,
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
      planes[thread] = raises[thread] = 0;
      ForEachHead(thread, [&](uint16_t head, uint32_t) {
        const int width = AdaptiveWidth(head, threshold, floor_);
        planes[thread] += static_cast<uint32_t>(width);
        raises[thread] += static_cast<uint32_t>(AdaptiveWidth(head, threshold - 1, floor_) - width);
      });
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

  // The smallest threshold that fits. The floor fits, so the highest one does, for any heads.
  //
  // A threshold is 128 t + f: a width is the head's exponent minus t, minus one if the head's
  // fraction is below f, clamped between the floor and the largest width. So counts of exponents
  // give the planes for every t, and counts of the fractions of blocks that f can narrow give the
  // planes for every f.
  THINWIRE_HD int Threshold() {
    CountHeads([&](uint16_t head) {
      return HasCodes(head) ? static_cast<int>(head >> kFractionBits) : -1;
    });
    SumFromAbove();
    constexpr int kFirst = -kMaxWidth;
    Counts too_many;
    team_.ForEach([&](unsigned thread) {
      too_many[thread] = 0;
      for (int t = kFirst + static_cast<int>(thread); t < kExponents; t += kThreads) {
        too_many[thread] += PlanesFrom(thread, t) > budget_;
      }
    });
    const uint32_t steps = SumBefore(too_many);
    if (steps == 0) return kLowestThreshold;
    const int t = kFirst + static_cast<int>(steps) - 1;  // the last one that does not fit
    Counts planes, narrowed;
    team_.ForEach([&](unsigned thread) { planes[thread] = PlanesFrom(thread, t); });
    team_.Sync();
    CountHeads([&](uint16_t head) {
      const int width = static_cast<int>(head >> kFractionBits) - t;
      const bool narrows = HasCodes(head) && width > floor_ && width <= kMaxWidth;
      return narrows ? static_cast<int>(head % kFractions) : -1;
    });
    team_.ForEach([&](unsigned thread) { narrowed[thread] = CountOf(thread, thread); });
    Counts own = narrowed;
    SumBefore(narrowed);
    team_.ForEach([&](unsigned thread) {
      const uint32_t left = planes[thread] - narrowed[thread] - own[thread];  // of f = thread + 1
      too_many[thread] = thread + 1 < kFractions && left > budget_;
    });
    return (t << kFractionBits) + static_cast<int>(SumBefore(too_many)) + 1;
  }

  // bins[b] = the number of heads with bin_of(head) = b; heads with a bin below 0 are not counted.
  template <typename BinOf>
  THINWIRE_HD void CountHeads(BinOf bin_of) {
    team_.ForEach([&](unsigned thread) { shared_.bins.Put(team_, thread, thread, 0); });
    team_.Sync();
    team_.ForEach([&](unsigned thread) {
      int last = -1;  // neighbours are often equal: one addition per run
      uint32_t run = 0;
      const auto add = [&] {
        if (last >= 0) shared_.bins.Add(team_, thread, static_cast<unsigned>(last), run);
      };
      ForEachHead(thread, [&](uint16_t head, uint32_t) {
        const int bin = bin_of(head);
        if (bin != last) {
          add();
          last = bin;
          run = 0;
        }
        ++run;
      });
      add();
    });
    team_.Sync();
  }

  THINWIRE_HD uint32_t CountOf(unsigned thread, unsigned bin) {
    return shared_.bins.Get(team_, thread, bin);
  }

  // Converts counts of exponents to counts of that exponent and all above.
  THINWIRE_HD void SumFromAbove() {
    Counts above;
    team_.ForEach([&](unsigned thread) { above[thread] = CountOf(thread, kThreads - 1 - thread); });
    Counts own = above;
    SumBefore(above);
    team_.ForEach([&](unsigned thread) {
      shared_.bins.Put(team_, thread, kThreads - 1 - thread, above[thread] + own[thread]);
    });
    team_.Sync();
  }

  // Planes of all blocks for the threshold 128 t.
  THINWIRE_HD uint32_t PlanesFrom(unsigned thread, int t) {
    const uint32_t all = CountOf(thread, 0);
    uint32_t planes = static_cast<uint32_t>(floor_) * all;
    for (int width = floor_ + 1; width <= kMaxWidth; ++width) {
      const int exponent = t + width;
      if (exponent < int{kThreads}) {
        planes += exponent <= 0 ? all : CountOf(thread, static_cast<unsigned>(exponent));
      }
    }
    return planes;
  }

  // Calls visit(head, block) for the blocks of a thread, which are consecutive.
  template <typename Visit>
  THINWIRE_HD void ForEachHead(unsigned thread, Visit visit) const {
    constexpr unsigned kAtOnce = 16 / sizeof(uint16_t);
    const uint32_t begin = thread * each_;
    const uint32_t end = begin + each_ < blocks_ ? begin + each_ : blocks_;
    for (uint32_t block = begin; block < end; block += kAtOnce) {
      alignas(16)
          uint16_t heads[kAtOnce];  // those after the last one are padding, and not looked at
      CopyWord<sizeof(heads)>(heads, wire_ + size_t{block} * sizeof(uint16_t));
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (block + i < end) visit(heads[i], block + i);
      }
    }
  }

  // The block of a thread with its raise number `nth`: lowering the threshold by one raises a width
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

  // Sets each thread's count to the sum over the threads before it, and returns the total.
  THINWIRE_HD uint32_t SumBefore(Counts& count) {
    Counts all;
    ExclusiveSum(team_, shared_.sums, count, all);
    return all[0];  // the same in all threads
  }

  Team& team_;
  PlanShared<Team>& shared_;
  const int floor_;
  const uint8_t* const wire_;
  const uint32_t blocks_, each_, budget_;
};

template <typename Team>
THINWIRE_HD void PlanShard(Team& team, PlanShared<Team>& shared, const PlanLaunch& launch,
                           WidthsPlan* plans, uint32_t shard) {
  const PlanJob& job = launch.job[shard];
  ShardPlanner<Team>(team, shared, launch.codec, job.wire, job.blocks).Run(plans + shard);
}

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_WIDTHS_PLAN_H_
