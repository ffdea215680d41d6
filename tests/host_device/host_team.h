// HostTeam: a team of threads on the CPU, one thread after the other. It runs the very code that a
// GPU runs, so that a wrong index, an access out of bounds and a missing Sync show without a GPU.
//
// A team (DeviceTeam in cuda_team.cuh is the other one): kThreads threads in warps of 32,
// of which every thread runs what ForEach is given. PerThread is a variable of each thread. Shared
// memory is seen by all; what one thread puts there, another may get after a Sync.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kernels/tuning.h"

namespace thinwire::kernels {

class HostTeam {
 public:
  template <typename T>
  class PerThread {
   public:
    T& operator[](unsigned thread) { return values_[thread]; }

   private:
    std::array<T, kThreads> values_;
  };

  // Remembers who touched what since the last Sync: a kernel with a race is our bug, and ends here.
  template <typename T, unsigned kCount>
  class Shared {
   public:
    T Get(const HostTeam& team, unsigned thread, unsigned i) {
      Cell& cell = Check(team, i);
      if (cell.writer != kNobody && cell.writer != thread) Race("gets what", cell.writer, thread);
      cell.reader = cell.reader == kNobody || cell.reader == thread ? thread : kSeveral;
      return cell.value;
    }
    void Put(const HostTeam& team, unsigned thread, unsigned i, T value) {
      Cell& cell = Check(team, i);
      if (cell.writer != kNobody && cell.writer != thread) Race("puts what", cell.writer, thread);
      if (cell.reader != kNobody && cell.reader != thread) Race("puts what", cell.reader, thread);
      cell.writer = thread;
      cell.value = value;
    }
    // Atomic: several threads may add between two Syncs, but none may get or put then.
    void Add(const HostTeam& team, unsigned thread, unsigned i, T value) {
      Cell& cell = Check(team, i);
      if (cell.writer != kNobody && cell.writer != kAdders) {
        Race("adds to what", cell.writer, thread);
      }
      if (cell.reader != kNobody) Race("adds to what", cell.reader, thread);
      cell.writer = kAdders;
      cell.value += value;
    }

   private:
    static constexpr unsigned kNobody = ~0u, kSeveral = ~0u - 1, kAdders = ~0u - 2;
    struct Cell {
      T value;
      unsigned epoch = 0, writer = kNobody, reader = kNobody;
    };
    Cell& Check(const HostTeam& team, unsigned i) {
      Cell& cell = cells_.at(i);
      if (cell.epoch != team.epoch_) {
        cell.epoch = team.epoch_;
        cell.writer = cell.reader = kNobody;
      }
      return cell;
    }
    [[noreturn]] static void Race(const char* what, unsigned first, unsigned second) {
      std::fprintf(stderr, "thread %u %s thread %u touched since the last Sync\n", second, what,
                   first);
      std::abort();
    }
    std::array<Cell, kCount> cells_;
  };

  template <typename Body>
  void ForEach(Body body) {
    for (unsigned thread = 0; thread < kThreads; ++thread) body(thread);
  }

  void Sync() { ++epoch_; }

  // Adds in device memory, where teams meet. The old value is returned.
  static uint32_t AtomicAdd(uint32_t* sum, uint32_t value) {
    const uint32_t before = *sum;
    *sum = before + value;
    return before;
  }
  // Other teams see what this thread has written so far before what it writes from here on.
  static void Fence() {}
  // A word that another team has written in the same launch.
  static uint32_t Fresh(const uint32_t* word) { return *word; }

  // Lane 0 of each warp has the largest value of its warp.
  void WarpMax(PerThread<uint32_t>& value) {
    for (unsigned first = 0; first < kThreads; first += kWarp) {
      for (unsigned lane = 1; lane < kWarp; ++lane) {
        value[first] = std::max(value[first], value[first + lane]);
      }
    }
  }

  // other[t] = value of the thread whose lane differs from t's in `mask`.
  template <typename T>
  void Exchange(PerThread<T>& value, unsigned mask, PerThread<T>& other) {
    ForEach([&](unsigned thread) { other[thread] = value[thread ^ mask]; });
  }

 private:
  unsigned epoch_ = 1;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_
