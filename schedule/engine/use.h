// Use: one use of a bucket, from its submission until its memory is the caller's again. A named
// bucket uses its object again once nobody else holds it.
#ifndef THINWIRE_SCHEDULE_ENGINE_USE_H_
#define THINWIRE_SCHEDULE_ENGINE_USE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "compress/error_feedback.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/bucket.h"
#include "schedule/order/outbox.h"
#include "schedule/work.h"
#include "transport/store.h"

namespace thinwire {

class Use;
using UsePtr = std::shared_ptr<Use>;

// Finishes a use on the thread of whoever waits for it.
class Finisher {
 public:
  virtual ~Finisher() = default;
  // Finishes it, unless somebody else does.
  virtual void Help(const UsePtr& use) = 0;
};

// When a tensor on a device may be touched, and when it is done. Null members on the host.
struct DeviceOrder {
  std::shared_ptr<DeviceEvent> ready;  // the caller's work on the input
  std::shared_ptr<Fence> fence;        // the engine's work on input, output, residual and momentum
};

// Where a bucket's residuals were found last. It does not keep them: residuals that somebody holds
// can't move to another bucket.
struct BoundMemory {
  uint64_t generation = 0;  // of ErrorFeedback; 0: never bound
  std::weak_ptr<float[]> residual, carried;
  absl::InlinedVector<std::weak_ptr<float[]>, 2> arrays;
  std::shared_ptr<Fence> fence;
  std::shared_ptr<UndoLog> undo;
};

class Use final : public Work, public std::enable_shared_from_this<Use> {
 public:
  // Fixed before any other thread sees them.
  std::shared_ptr<const Bucket> bucket;
  std::string label;  // the tensor's name in messages
  TensorView input, output;
  std::shared_ptr<Device> device;  // null: the host
  void* stream = nullptr;          // the caller's
  DeviceOrder order;
  BoundMemory bound;
  BucketMemory memory;
  std::vector<Range> absent;  // elements, in the partition's order, that this rank has nothing for
  uint64_t step = 0;
  float divisor = 0.0f;  // of the mean, in place of the bucket's; 0: the bucket's
  Report report;
  Deadline submitted, deadline;
  Finisher* finisher = nullptr;  // null: lanes finish it

  uint64_t id() const { return report.id(); }

  // One use of one of the bucket's chunks.
  ChunkJob JobOf(uint32_t chunk, const Options& options) const;

  // Makes it as good as new, for another use. Nobody else holds it.
  void Renew();

  // Some thread is at work on a chunk from here on; false if the group has failed.
  bool BeginChunk();
  // kDone: all chunks are done. kFailed: the group has failed, and no thread is at work on a chunk
  // any more. Whoever gets one of these retires the use.
  enum class Left { kSome, kDone, kFailed };
  Left EndChunk(bool ok);
  // The group has failed: no chunk begins any more. True if the caller is to retire the use, since
  // no thread is at work on it.
  bool Close();

  // From here on the memory is the caller's.
  void Complete(absl::Status status);

  absl::Status Wait() override { return WaitOn(stream); }
  absl::Status WaitOn(void* stream) override;
  bool done() const override;

  // A line for people.
  std::string Describe(Deadline now) const;

 private:
  mutable absl::Mutex mu_;
  size_t chunks_left_ ABSL_GUARDED_BY(mu_) = 0;
  int chunks_running_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// The use that a sequencer was given, and that comes back with each of its chunks.
inline Use& UseOf(const StartChunk& start) { return *static_cast<Use*>(start.host.get()); }

// A work that was over before it began.
std::shared_ptr<Work> DoneWork();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_USE_H_
