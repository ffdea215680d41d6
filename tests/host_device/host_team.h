// HostTeam: a team of threads run on the CPU one after the other. It runs the same code as a GPU,
// so a wrong index, an access out of bounds or a missing Sync is found without a GPU.
//
// A team (DeviceTeam in cuda_team.cuh is the other kind) has up to kThreads threads in warps of 32,
// and every thread runs the body given to ForEach. PerThread is a variable per thread. Shared
// memory is visible to all threads: others may read a value after a Sync, or within the warp after
// a SyncWarp. Staged is shared memory of one warp that is filled from device memory while the team
// continues: a thread may read its bytes once it has awaited their group of fetches, other lanes
// after a SyncWarp.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/tuning.h"

namespace thinwire::kernels {

class HostTeam {
 public:
  explicit HostTeam(unsigned threads = kThreads) : threads_(threads) {}

  template <typename T>
  class PerThread {
   public:
    T& operator[](unsigned thread) { return values_[thread]; }

   private:
    std::array<T, kThreads> values_;
  };

  // Records who accessed each value since the last Sync, and since the last SyncWarp, which is
  // enough within a warp. A race is a bug in a kernel, and aborts.
  template <typename T, unsigned kCount>
  class Shared {
   public:
    T Get(const HostTeam& team, unsigned thread, unsigned i) {
      Cell& cell = Of(team, i);
      cell.warps.Get("warp", thread / kWarp);
      cell.threads.Get("thread", thread);
      return cell.value;
    }
    void Put(const HostTeam& team, unsigned thread, unsigned i, T value) {
      Cell& cell = Of(team, i);
      cell.warps.Put("warp", thread / kWarp);
      cell.threads.Put("thread", thread);
      cell.value = value;
    }
    // Atomic: several threads may add between two Syncs, but none may Get or Put then.
    void Add(const HostTeam& team, unsigned thread, unsigned i, T value) {
      Cell& cell = Of(team, i);
      cell.warps.Add("warp", thread / kWarp);
      cell.value += value;
    }

   private:
    static constexpr unsigned kNobody = ~0u, kSeveral = ~0u - 1, kAdders = ~0u - 2;
    struct Touched {
      unsigned epoch = 0, writer = kNobody, reader = kNobody;

      void Begin(unsigned now) {
        if (epoch != now) *this = {.epoch = now};
      }
      void Get(const char* who, unsigned id) {
        if (writer != kNobody && writer != id) Race(who, id, "gets", writer);
        reader = reader == kNobody || reader == id ? id : kSeveral;
      }
      void Put(const char* who, unsigned id) {
        if (writer != kNobody && writer != id) Race(who, id, "puts", writer);
        if (reader != kNobody && reader != id) Race(who, id, "puts", reader);
        writer = id;
      }
      void Add(const char* who, unsigned id) {
        if (writer != kNobody && writer != kAdders) Race(who, id, "adds to", writer);
        if (reader != kNobody) Race(who, id, "adds to", reader);
        writer = kAdders;
      }
      [[noreturn]] static void Race(const char* who, unsigned id, const char* what,
                                    unsigned first) {
        std::fprintf(stderr, "%s %u %s what %s %u touched since the last sync\n", who, id, what,
                     who, first);
        std::abort();
      }
    };
    struct Cell {
      T value;
      Touched warps, threads;  // since the last Sync; since the last SyncWarp
    };
    Cell& Of(const HostTeam& team, unsigned i) {
      Cell& cell = cells_.at(i);
      cell.warps.Begin(team.epoch_);
      cell.threads.Begin(team.warp_epoch_);
      return cell;
    }
    std::array<Cell, kCount> cells_;
  };

  // Aborts if bytes are read too early, or fetched to a place that another lane may still read.
  template <unsigned kBytes>
  class Staged {
   public:
    template <unsigned kCount>
    void Fetch(const HostTeam& team, unsigned thread, unsigned at, const uint8_t* from) {
      static_assert(kCount == 4 || kCount == 8 || kCount == 16, "what cp.async copies");
      if (at % kCount != 0 || reinterpret_cast<uintptr_t>(from) % kCount != 0) {
        Fail("fetches bytes that are not aligned", thread);
      }
      for (unsigned i = 0; i < kCount; ++i) {
        Byte& byte = bytes_.at(at + i);
        const bool others = byte.reader != kNobody && byte.reader != thread;
        if (others && byte.read_in == team.warp_epoch_) Fail("fetches over what is read", thread);
        if (byte.writer != kNobody && byte.group >= team.awaited_) {
          Fail("fetches over what is being fetched", thread);
        }
        byte = {from[i], thread, team.committed_, kNobody, 0};
      }
    }
    template <unsigned kCount>
    void Get(const HostTeam& team, unsigned thread, unsigned at, void* to) {
      for (unsigned i = 0; i < kCount; ++i) {
        Byte& byte = bytes_.at(at + i);
        if (byte.writer == kNobody) Fail("gets what nobody fetched", thread);
        if (byte.writer / kWarp != thread / kWarp) Fail("gets another warp's bytes", thread);
        const unsigned seen = byte.writer == thread ? team.awaited_ : team.synced_;
        if (byte.group >= seen) Fail("gets what has not arrived", thread);
        const bool again = byte.read_in == team.warp_epoch_ && byte.reader != kNobody;
        byte.reader = again && byte.reader != thread ? kSeveral : thread;
        byte.read_in = team.warp_epoch_;
        static_cast<uint8_t*>(to)[i] = byte.value;
      }
    }

   private:
    static constexpr unsigned kNobody = ~0u, kSeveral = ~0u - 1;
    struct Byte {
      uint8_t value;
      unsigned writer = kNobody, group = 0, reader = kNobody, read_in = 0;
    };
    [[noreturn]] static void Fail(const char* what, unsigned thread) {
      std::fprintf(stderr, "thread %u %s\n", thread, what);
      std::abort();
    }
    std::array<Byte, kBytes> bytes_;
  };

  // Ends a group of fetches, for every thread.
  void CommitFetches() { ++committed_; }
  // Waits for all groups but the last kLater.
  template <unsigned kLater>
  void AwaitFetches() {
    if (committed_ > kLater) awaited_ = committed_ - kLater;
  }
  void SyncWarp() {
    synced_ = awaited_;
    ++warp_epoch_;
  }

  template <typename Body>
  void ForEach(Body body) {
    for (unsigned thread = 0; thread < threads_; ++thread) body(thread);
  }

  void Sync() {
    SyncWarp();
    ++epoch_;
  }

  // Adds in device memory, which all teams share. Returns the old value.
  static uint32_t AtomicAdd(uint32_t* sum, uint32_t value) {
    const uint32_t before = *sum;
    *sum = before + value;
    return before;
  }
  // Makes this thread's earlier writes visible to other teams before its later ones.
  static void Fence() {}
  // Reads a word that another team has written in the same launch.
  static uint32_t Fresh(const uint32_t* word) { return *word; }

  // Leaves the largest value of each warp in its lane 0.
  void WarpMax(PerThread<uint32_t>& value) {
    for (unsigned first = 0; first < threads_; first += kWarp) {
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
  const unsigned threads_;
  unsigned epoch_ = 1, warp_epoch_ = 1;
  unsigned committed_ = 0, awaited_ = 0, synced_ = 0;  // groups of fetches
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_TEAM_H_
