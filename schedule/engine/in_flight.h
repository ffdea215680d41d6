// InFlight: one collective from its submission until its memory is the caller's again. A named
// bucket uses its object again once nobody else holds it.
#ifndef THINWIRE_SCHEDULE_ENGINE_IN_FLIGHT_H_
#define THINWIRE_SCHEDULE_ENGINE_IN_FLIGHT_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/bucket.h"
#include "schedule/engine/lane.h"
#include "schedule/work.h"
#include "transport/data_plane.h"

namespace thinwire {

class InFlight;

// Who can finish a work on the thread of whoever waits for it.
class Finisher {
 public:
  virtual ~Finisher() = default;
  // Finishes it, unless somebody else does.
  virtual void Help(const std::shared_ptr<InFlight>& work) = 0;
};

class InFlight final : public Work, public std::enable_shared_from_this<InFlight> {
 public:
  // The use of a bucket, fixed before any other thread sees it.
  std::shared_ptr<const Bucket> bucket;
  std::string label;  // the tensor's name in messages
  TensorView input, output;
  std::shared_ptr<Device> device;  // null: the host
  void* stream = nullptr;          // the caller's
  DeviceOrder order;
  BucketMemory memory;
  std::vector<Range> absent;  // elements, in the partition's order, that this rank has nothing for
  uint64_t step = 0;
  std::atomic<uint64_t> digest{0};  // of the chunks that are done, where it is asked for
  Report report;
  Deadline submitted, deadline;
  Finisher* finisher = nullptr;  // null: lanes finish it

  // Guarded by Works, which alone touches them.
  size_t chunks_left = 0;
  int chunks_running = 0;

  uint64_t id() const { return report.id(); }

  // One use of one of the bucket's chunks.
  ChunkJob JobOf(uint32_t chunk, const Options& options) const;

  // Makes it as good as new, for another use. Nobody else holds it.
  void Renew();
  // From here on the memory is the caller's.
  void Complete(absl::Status status);

  absl::Status Wait() override { return WaitOn(stream); }
  absl::Status WaitOn(void* stream) override;
  bool done() const override;

 private:
  mutable absl::Mutex mu_;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// A work that was over before it began.
std::shared_ptr<Work> DoneWork();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_IN_FLIGHT_H_
