// InFlight: one allreduce from its submission until its memory is the caller's again.
#ifndef THINWIRE_SCHEDULE_IN_FLIGHT_H_
#define THINWIRE_SCHEDULE_IN_FLIGHT_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "schedule/engine.h"
#include "schedule/lane.h"
#include "schedule/momentum.h"
#include "schedule/plan.h"
#include "schedule/protocol.h"
#include "schedule/raw_exchange.h"
#include "schedule/work.h"

namespace thinwire {

class InFlight final : public Work {
 public:
  // Fixed before any other thread sees it.
  std::string name;  // for messages
  std::string key;   // empty for unnamed
  TensorView input, output;
  float scale = 1.0f;
  std::shared_ptr<Device> device;  // null: the host
  void* stream = nullptr;          // the caller's
  DeviceOrder order;
  std::shared_ptr<const Plan> plan;
  BucketMemory memory;
  std::shared_ptr<uint32_t[]> thresholds;  // of topk, by chunk
  std::vector<Range> absent;  // elements of the plan's order that this rank has nothing for
  uint64_t step = 0;
  Report report;
  Clock::time_point submitted;
  Deadline deadline;
  // Of a tensor that goes raw; chunks have their own.
  std::unique_ptr<LaneBuffers> buffers;
  std::unique_ptr<RawExchange> raw;
  std::optional<MomentumStep> momentum;
  std::function<void()> finish_raw;  // claims and finishes it; run by whoever waits first

  // Guarded by the engine's mutex.
  size_t chunks_left = 0;
  int chunks_running = 0;
  bool raw_begun = false;
  bool raw_claimed = false;
  bool reported = false;
  bool overdue = false;
  Clock::time_point overdue_since;

  uint64_t id() const { return report.id(); }

  // From here on the memory is the caller's.
  void Complete(absl::Status status);

  absl::Status Wait() override { return WaitOn(stream); }
  absl::Status WaitOn(void* stream) override;
  bool done() const override;

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
};

// A work that was over before it began.
std::shared_ptr<Work> DoneWork();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_IN_FLIGHT_H_
