// WorkQueue: the samples of some epochs, handed out in ranges to whichever worker asks, so that
// unequal machines do unequal work. Pure logic: the keeper, server 0, tells it what arrives.
//
// A worker numbers what it takes, from 1, and says with each request up to which number its ranges
// are applied. Those that are not, go back when the worker is gone, and are the next to be handed
// out. So each sample is handed out once as long as no worker goes, and is applied at least once in
// any case. Who asks when nothing is left waits for what the others hold.
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

// The same on all workers.
struct WorkPlan {
  uint64_t samples = 0;  // of an epoch
  uint64_t batch = 1;    // samples of a range; the last one of an epoch has the rest
  uint64_t epochs = 1;

  // "samples batch epochs". InvalidArgument for another text or numbers that can't be.
  static absl::StatusOr<WorkPlan> Parse(std::string_view text);
  std::string ToString() const;
  friend bool operator==(const WorkPlan&, const WorkPlan&) = default;
};

struct WorkRange {
  uint64_t epoch = 0, first = 0, count = 0;  // count 0: no work is left, or comes
  friend bool operator==(const WorkRange&, const WorkRange&) = default;
};

class WorkQueue {
 public:
  explicit WorkQueue(const WorkPlan& plan) : plan_(plan) {}

  const WorkPlan& plan() const { return plan_; }

  // The worker's ranges up to this number are applied.
  void Apply(int worker, uint64_t number);
  // The worker's range of that number: the same when it asks again. Nothing if what is left is
  // held.
  std::optional<WorkRange> Take(int worker, uint64_t number);
  // The worker is gone.
  void GiveBack(int worker);

  void Save(ByteWriter& to) const;
  // Takes what Save of a queue of the same plan has written; false for other bytes.
  bool Restore(ByteReader& from);

 private:
  const WorkPlan plan_;
  uint64_t epoch_ = 0, first_ = 0;  // what was never handed out
  std::deque<WorkRange> returned_;
  std::map<int, std::map<uint64_t, WorkRange>> held_;  // by worker and number
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_WORK_QUEUE_H_
