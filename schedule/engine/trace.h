// Trace: the stages of every lane's chunks, as Chrome trace JSON (chrome://tracing, Perfetto).
#ifndef THINWIRE_SCHEDULE_ENGINE_TRACE_H_
#define THINWIRE_SCHEDULE_ENGINE_TRACE_H_

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "absl/status/status.h"
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

// Lanes add concurrently, each to its own row. At most kMaxEvents a lane are kept, the first ones.
class Trace {
 public:
  static constexpr size_t kMaxEvents = 200000;

  // The file is PathOfRank(path, rank).
  Trace(const std::string& path, int rank, int lanes);

  void Add(int lane, TraceEvent event);
  // Call when no lane adds any more.
  absl::Status Write() const;
  const std::string& path() const { return path_; }

 private:
  void Put(std::ostream& out, size_t lane, const TraceEvent& event) const;

  const std::string path_;
  const int rank_;
  std::vector<std::vector<TraceEvent>> lanes_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TRACE_H_
