// EntryDigits: finds the k-th largest key digit by digit, by counting the elements with each digit:
// the radix selection of topk's encoding.
#ifndef THINWIRE_KERNELS_ENTRY_DIGITS_H_
#define THINWIRE_KERNELS_ENTRY_DIGITS_H_

#include "compress/codecs/topk.h"
#include "kernels/entry_jobs.h"
#include "kernels/team_sum.h"

namespace thinwire::kernels {

struct Digit {
  unsigned shift, bits;

  THINWIRE_HD uint32_t Of(uint32_t key) const { return key >> shift & ((1u << bits) - 1); }
  // The digits before (above) this one.
  THINWIRE_HD uint32_t Before(uint32_t key) const { return key >> shift >> bits; }
};

THINWIRE_HD Digit DigitOf(unsigned number) {
  return number == 0 ? Digit{20, 11} : number == 1 ? Digit{10, 10} : Digit{0, 10};
}

template <typename Team>
class EntryDigits {
  template <typename T>
  using PerThread = typename Team::template PerThread<T>;
  static constexpr unsigned kOwn = kBins / kThreads;  // bins per thread

 public:
  struct Shared {
    typename Team::template Shared<uint32_t, kBins> bins;
  };

  THINWIRE_HD EntryDigits(Team& team, Shared& shared, SumShared<Team>& sums,
                          const EncodeEntriesLaunch& launch, unsigned number)
      : team_(team), shared_(shared), sums_(sums), launch_(launch), number_(number) {}

  // Call Sync between this and the first Count.
  THINWIRE_HD void Clear() {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kOwn; ++i) {
        shared_.bins.Put(team_, thread, i * kThreads + thread, 0);
      }
    });
  }

  THINWIRE_HD void Count(unsigned thread, uint32_t key) {
    shared_.bins.Add(team_, thread, DigitOf(number_).Of(key), 1);
  }

  // Adds the team's counts to those of the other teams. Call it after a Sync.
  THINWIRE_HD void Flush() {
    team_.ForEach([&](unsigned thread) {
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kOwn; ++i) {
        const unsigned bin = i * kThreads + thread;
        const uint32_t count = shared_.bins.Get(team_, thread, bin);
        if (count != 0) Team::AtomicAdd(&state().bins[number_][bin], count);
      }
    });
  }

  // Call it when all teams' counts are complete: finds the digit of the k-th key, searching from
  // the highest down.
  THINWIRE_HD void Pick() {
    const uint32_t wanted = number_ == 0 ? launch_.entries : state().wanted;
    const uint32_t key = number_ == 0 ? 0 : state().key;
    PerThread<uint32_t> own, above, all;
    team_.ForEach([&](unsigned thread) {
      own[thread] = 0;
      THINWIRE_UNROLL
      for (unsigned i = 0; i < kOwn; ++i) own[thread] += CountOf(BinOf(thread, i));
      above[thread] = own[thread];
    });
    ExclusiveSum(team_, sums_, above, all);
    team_.ForEach([&](unsigned thread) {
      uint32_t before = above[thread];
      if (before >= wanted || before + own[thread] < wanted) return;
      unsigned i = 0;
      for (; before + CountOf(BinOf(thread, i)) < wanted; ++i) before += CountOf(BinOf(thread, i));
      Settle(key << DigitOf(number_).bits | BinOf(thread, i), wanted - before);
    });
  }

 private:
  THINWIRE_HD EntryState& state() const { return *launch_.room.state; }
  THINWIRE_HD static unsigned BinOf(unsigned thread, unsigned i) {
    return kBins - 1 - (thread * kOwn + i);
  }
  THINWIRE_HD uint32_t CountOf(unsigned bin) const {
    return Team::Fresh(&state().bins[number_][bin]);
  }

  THINWIRE_HD void Settle(uint32_t key, uint32_t wanted) {
    state().key = key;
    state().wanted = wanted;
    if (number_ + 1 < kDigits || launch_.threshold == nullptr) return;
    *launch_.threshold = FloatOf(key < kHugeBits ? key : kHugeBits);
  }

  Team& team_;
  Shared& shared_;
  SumShared<Team>& sums_;
  const EncodeEntriesLaunch& launch_;
  const unsigned number_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_DIGITS_H_
