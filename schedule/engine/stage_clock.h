// StageClock: the time that each stage of a chunk took, for the statistics and the trace.
#ifndef THINWIRE_SCHEDULE_ENGINE_STAGE_CLOCK_H_
#define THINWIRE_SCHEDULE_ENGINE_STAGE_CLOCK_H_

#include <array>
#include <atomic>
#include <chrono>

#include "schedule/engine/trace.h"
#include "schedule/stats.h"
#include "transport/store.h"

namespace thinwire {

// Nanoseconds by stage, summed over all lanes. Thread-safe.
class StageTotals {
 public:
  void Add(Stage stage, Clock::duration spent) {
    nanoseconds_[static_cast<int>(stage)] += std::chrono::nanoseconds(spent).count();
  }
  double seconds(int stage) const { return 1e-9 * nanoseconds_[stage]; }

 private:
  std::array<std::atomic<int64_t>, kStages> nanoseconds_{};
};

// Follows one chunk through its stages, each beginning where the last one ended.
class StageClock {
 public:
  // `trace` may be null. `name` must outlive the clock.
  StageClock(StageTotals* totals, Trace* trace, int row, const std::string& name, uint32_t chunk,
             Clock::time_point queued)
      : totals_(totals), trace_(trace), row_(row), name_(name), chunk_(chunk), last_(queued) {}

  void End(Stage stage) {
    const Clock::time_point now = Clock::now();
    totals_->Add(stage, now - last_);
    if (trace_ != nullptr) trace_->Add(row_, {name_, chunk_, stage, last_, now});
    last_ = now;
  }

 private:
  StageTotals* const totals_;
  Trace* const trace_;
  const int row_;
  const std::string& name_;
  const uint32_t chunk_;
  Clock::time_point last_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_STAGE_CLOCK_H_
