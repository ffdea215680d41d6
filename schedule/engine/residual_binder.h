// ResidualBinder: hands out the residuals of buckets, to one caller at a time, who may wait for a
// device meanwhile. A bucket whose layout has not changed gets its own back by a comparison of one
// number.
#ifndef THINWIRE_SCHEDULE_ENGINE_RESIDUAL_BINDER_H_
#define THINWIRE_SCHEDULE_ENGINE_RESIDUAL_BINDER_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/error_feedback.h"
#include "schedule/engine/bucket.h"

namespace thinwire {

// Where a bucket's residuals were found last. It does not keep them: residuals that somebody holds
// can't move to another bucket.
struct BoundMemory {
  uint64_t generation = 0;  // of ErrorFeedback; 0: never bound
  std::weak_ptr<float[]> residual, momentum, carried;
  std::shared_ptr<Fence> fence;
  std::shared_ptr<UndoLog> undo;
};

// Thread-safe.
class ResidualBinder {
 public:
  // `undo`: as ErrorFeedback takes it.
  ResidualBinder(std::shared_ptr<Device> device, size_t fence_slots, bool undo)
      : feedback_(std::move(device), fence_slots, undo) {}

  // InvalidArgument if another tensor in flight holds a residual of this one.
  absl::StatusOr<BucketMemory> Bind(const Bucket& bucket, BoundMemory* last);

  // For reading and writing residuals while nothing is in flight.
  ErrorFeedback& feedback() { return feedback_; }

 private:
  void Enter();
  void Exit();
  bool IsFree() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !busy_; }

  ErrorFeedback feedback_;  // of whoever has entered
  absl::Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_RESIDUAL_BINDER_H_
