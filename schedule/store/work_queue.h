// WorkQueue: the samples of some epochs, handed out in ranges to any worker that asks, so that
// faster machines do more work. Pure logic, hosted by server 0.
//
// A worker numbers its ranges from 1, and each of its requests says up to which number they are
// applied. When a worker is gone, its ranges that are not applied are the next to be handed out. So
// each sample is handed out once if no worker goes, and is applied at least once in any case. A
// worker that asks when nothing is left waits for the ranges that others hold.
#ifndef THINWIRE_SCHEDULE_STORE_WORK_QUEUE_H_
#define THINWIRE_SCHEDULE_STORE_WORK_QUEUE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "schedule/store/bytes.h"

namespace thinwire {

// Must be the same on all workers.
struct WorkPlan {
  uint64_t samples = 0;  // per epoch
  uint64_t batch = 1;    // samples per range; an epoch's last range may have fewer
  uint64_t epochs = 1;

  // "samples batch epochs". InvalidArgument for any other text or numbers out of range.
  static absl::StatusOr<WorkPlan> Parse(std::string_view text);
  std::string ToString() const;
  friend bool operator==(const WorkPlan&, const WorkPlan&) = default;
};

struct WorkRange {
  uint64_t epoch = 0, first = 0, count = 0;  // count 0: all work is done
  friend bool operator==(const WorkRange&, const WorkRange&) = default;
};

class WorkQueue {
 public:
  explicit WorkQueue(const WorkPlan& plan) : plan_(plan) {}

  const WorkPlan& plan() const { return plan_; }

  // The worker's ranges up to this number are applied.
  void Apply(int worker, uint64_t number);
  // The worker's range of that number, the same if it asks again. nullopt if other workers hold all
  // remaining work.
  std::optional<WorkRange> Take(int worker, uint64_t number);
  // The worker is gone.
  void GiveBack(int worker);

  void Save(ByteWriter& to) const;
  // Reads what Save of a queue with the same plan has written; false for other bytes.
  bool Restore(ByteReader& from);

 private:
  const WorkPlan plan_;
  uint64_t epoch_ = 0, first_ = 0;  // the first sample never handed out
  std::deque<WorkRange> returned_;
  std::map<int, std::map<uint64_t, WorkRange>> held_;  // by worker and number
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_WORK_QUEUE_H_
