// Work: one allreduce in flight.
#ifndef THINWIRE_SCHEDULE_WORK_H_
#define THINWIRE_SCHEDULE_WORK_H_

#include "absl/status/status.h"

namespace thinwire {

// Thread-safe. Dropping it does not cancel the allreduce.
class Work {
 public:
  virtual ~Work() = default;
  virtual absl::Status Wait() = 0;  // returns within the group's timeout and a short grace
  virtual bool done() const = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_WORK_H_
