// UndoLog: what a bucket's residuals and momentum were before its last use. A use that failed
// half-way has encoded some chunks and not others; taken back as a whole, it was never made.
#ifndef THINWIRE_COMPRESS_UNDO_LOG_H_
#define THINWIRE_COMPRESS_UNDO_LOG_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "compress/backend.h"
#include "compress/device.h"
#include "compress/float_memory.h"
#include "compress/range.h"

namespace thinwire {

// Thread-safe: the chunks of a use save disjoint ranges.
class UndoLog {
 public:
  // Room for as many floats as the residuals and the momentum have, in the same memory; null where
  // there are none.
  UndoLog(std::shared_ptr<float[]> residual, std::shared_ptr<float[]> momentum, bool on_device)
      : residual_(std::move(residual)), momentum_(std::move(momentum)), on_device_(on_device) {}

  // A use begins: the one before it can't be taken back any more.
  void Begin();

  // Before a chunk changes these elements of the bucket's memory, which starts at `residual` and
  // `momentum` (null: unused). On a device it is queued on the backend's stream.
  void Save(const Backend& backend, Range elements, const float* residual, const float* momentum);

  // Puts back what the last use has saved, after the fence, which may be null; once. `residual` and
  // `momentum` are the whole bucket's, of `numel` floats. Nothing may be in flight.
  absl::Status Restore(const FloatMemory& memory, const Fence* after, size_t numel, float* residual,
                       float* momentum);

 private:
  const std::shared_ptr<float[]> residual_, momentum_;
  const bool on_device_;
  absl::Mutex mu_;
  std::vector<Range> saved_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_UNDO_LOG_H_
