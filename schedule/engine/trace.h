// Trace: the stages of all chunks, in rows of which each holds one chunk at a time, as Chrome trace
// JSON (chrome://tracing, Perfetto).
#ifndef THINWIRE_SCHEDULE_ENGINE_TRACE_H_
#define THINWIRE_SCHEDULE_ENGINE_TRACE_H_

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "schedule/stats.h"
#include "transport/store.h"

namespace thinwire {

// "out/trace.json" becomes "out/trace.rank0.json" on rank 0.
std::string PathOfRank(const std::string& path, int rank);

struct TraceEvent {
  std::string name;  // tensor
  uint32_t chunk = 0;
  Stage stage = Stage::kQueue;
  Clock::time_point begin, end;
};

// At most kMaxEvents a row are kept, the first ones. Thread-safe.
class Trace {
 public:
  static constexpr size_t kMaxEvents = 200000;

  // The file is PathOfRank(path, rank).
  Trace(const std::string& path, int rank) : path_(PathOfRank(path, rank)), rank_(rank) {}

  // Slices of one row, but for those of kQueue, must not overlap.
  void Add(int row, TraceEvent event);
  absl::Status Write() const;
  const std::string& path() const { return path_; }

 private:
  void Put(std::ostream& out, size_t row, const TraceEvent& event) const;

  const std::string path_;
  const int rank_;
  mutable absl::Mutex mu_;
  std::vector<std::vector<TraceEvent>> rows_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TRACE_H_
