// Work: one collective in flight.
#ifndef THINWIRE_SCHEDULE_WORK_H_
#define THINWIRE_SCHEDULE_WORK_H_

#include "absl/status/status.h"

namespace thinwire {

// Thread-safe. Dropping it does not cancel the collective.
class Work {
 public:
  virtual ~Work() = default;
  // Returns within the group's timeout and a short grace. On the host the result is there then; on
  // a device it is there for later work of the stream that the call was made with.
  virtual absl::Status Wait() = 0;
  // The same, but for later work of this stream (a cudaStream_t); on the host as Wait.
  virtual absl::Status WaitOn(void* stream) = 0;
  virtual bool done() const = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_WORK_H_
