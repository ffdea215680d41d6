// Records: a human-readable record of an engine's work: seconds by stage and bytes since its
// creation (Stats), the last events, and a trace if one is requested.
#ifndef THINWIRE_SCHEDULE_ENGINE_RECORDS_H_
#define THINWIRE_SCHEDULE_ENGINE_RECORDS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "schedule/collective/algorithm.h"
#include "schedule/options.h"
#include "transport/membership.h"
#include "transport/store.h"

namespace thinwire {

// Counters of an engine since it was created.
struct Stats {
  uint64_t all_reduces = 0;  // collectives of any kind
  uint64_t raw_bytes = 0;    // what a ring of fp32 would send: 2 (n-1)/n * 4 N for an allreduce
  uint64_t wire_bytes = 0;   // sent by this rank, without control frames
  uint64_t predicted_chunks = 0;
  std::array<double, kStages> seconds{};  // summed over chunks, by Stage
};

enum class FlightEvent : uint8_t {
  kSubmitted,  // detail: elements
  kStarted,    // a chunk; detail: 1 if it was predicted
  kHopBegun,   // detail: the hop's number, from 1
  kHopEnded,
  kChunkDone,
  kTensorDone,
  kFrameOut,  // peer: the receiver (-1: every other rank); detail: FrameType
  kFrameIn,   // peer: the sender; detail: FrameType
  kFailed,    // name: the beginning of the reason
};

// "out/trace.json" becomes "out/trace.rank0.json" on rank 0.
std::string PathOfRank(const std::string& path, int rank);

// InvalidArgument, naming the setting, unless PathOfRank(path, rank) can be written. An empty path
// means no file. Leaves no new file behind.
absl::Status CheckPathOfRank(const char* setting, const std::string& path, int rank);

struct TraceEvent {
  std::string name;  // tensor
  uint32_t chunk = 0;
  Stage stage = Stage::kQueue;
  Clock::time_point begin, end;
};

// Trace: the stages of all chunks, as Chrome trace JSON (chrome://tracing, Perfetto), in rows that
// each hold one chunk at a time. Keeps the first kMaxEvents events of each row. Thread-safe.
class Trace {
 public:
  static constexpr size_t kMaxEvents = 200000;

  // The file is PathOfRank(path, rank).
  Trace(const std::string& path, int rank) : path_(PathOfRank(path, rank)), rank_(rank) {}

  // Events of one row must not overlap, except those of kQueue.
  void Add(int row, TraceEvent event);
  absl::Status Write() const;

 private:
  void Put(std::ostream& out, size_t row, const TraceEvent& event) const;

  const std::string path_;
  const int rank_;
  mutable absl::Mutex mu_;
  std::vector<std::vector<TraceEvent>> rows_ ABSL_GUARDED_BY(mu_);
};

// Recording an event takes no lock and allocates nothing. A new event replaces the oldest one; if a
// thread is still writing that one, the new event is lost. Thread-safe.
class Records {
 public:
  static constexpr size_t kEvents = 4096;  // the number of events that are kept

  // A trace is kept if options.trace_path is set.
  Records(const Membership& members, const Options& options);

  void Event(FlightEvent event, std::string_view name, uint32_t chunk = 0, int peer = 0,
             uint64_t detail = 0);
  // How dense allreduces go, then the last events, to see who waited for whom: oldest first, one
  // per line: seconds before now, event, tensor, chunk, peer, detail. Leaves out events that are
  // overwritten meanwhile.
  std::string LastEvents() const;

  // A collective has started for which a ring of fp32 would send `raw_bytes`. Returns the number of
  // collectives started so far.
  uint64_t AddCollective(uint64_t raw_bytes);
  // A predicted chunk has started.
  void AddPredicted() { ++predicted_; }
  // A chunk's stage, in its row of the trace.
  void AddStage(Stage stage, const std::string& tensor, uint32_t chunk, int row,
                Clock::time_point begin, Clock::time_point end);

  // All counters but wire_bytes.
  Stats stats() const;
  // Does nothing without a trace.
  absl::Status WriteTrace() const;

 private:
  // Copied as whole words, so that a reader and a writer only race on atomic words.
  struct Entry {
    int64_t nanoseconds = 0;
    uint64_t detail = 0;
    uint32_t chunk = 0;
    int16_t peer = 0;
    FlightEvent event = FlightEvent::kSubmitted;
    uint8_t name_bytes = 0;
    std::array<char, 40> name = {};
  };
  static constexpr size_t kWords = sizeof(Entry) / sizeof(uint64_t);
  static_assert(sizeof(Entry) == kWords * sizeof(uint64_t));
  static constexpr uint64_t kBeingWritten = ~uint64_t{0};
  struct Slot {
    std::atomic<uint64_t> number{0};  // the event's number, from 1; 0: no event yet
    std::array<std::atomic<uint64_t>, kWords> words{};
  };

  bool Read(uint64_t number, Entry* entry) const;

  const std::string way_;  // how dense allreduces go
  std::atomic<uint64_t> events_{0};
  const std::unique_ptr<Slot[]> slots_;
  std::optional<Trace> trace_;
  std::atomic<uint64_t> collectives_{0}, raw_bytes_{0}, predicted_{0};
  std::array<std::atomic<int64_t>, kStages> nanoseconds_{};  // summed over chunks
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_RECORDS_H_
