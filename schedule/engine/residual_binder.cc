#include "schedule/engine/residual_binder.h"

#include "absl/strings/str_cat.h"

namespace thinwire {

// A turn, not a lock: binding may move residuals on a device, and no lock is held over that.
void ResidualBinder::Enter() {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &ResidualBinder::IsFree));
  busy_ = true;
}

void ResidualBinder::Exit() {
  const absl::MutexLock lock(&mu_);
  busy_ = false;
}

absl::StatusOr<BucketMemory> ResidualBinder::Bind(const Bucket& bucket, BoundMemory* last) {
  Enter();
  if (last->generation != 0 && last->generation == feedback_.generation()) {
    BucketMemory memory{last->residual.lock(), last->momentum.lock(), last->carried.lock(),
                        last->fence, last->undo};
    Exit();
    return memory;
  }
  absl::StatusOr<BucketMemory> memory = feedback_.Bind(bucket.key(), bucket.layout());
  if (memory.ok()) {
    *last = {feedback_.generation(), memory->residual, memory->momentum,
             memory->carried,        memory->fence,    memory->undo};
  }
  Exit();
  return memory;
}

}  // namespace thinwire
