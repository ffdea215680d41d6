// FloatMemory: arrays of floats on the host or on a device, and copies from and to them. UndoLog:
// earlier contents of such arrays.
#ifndef THINWIRE_COMPRESS_FLOAT_MEMORY_H_
#define THINWIRE_COMPRESS_FLOAT_MEMORY_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/backend.h"
#include "compress/device.h"
#include "compress/types.h"

namespace thinwire {

class FloatMemory {
 public:
  FloatMemory() = default;  // host memory
  explicit FloatMemory(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  bool on_device() const { return device_ != nullptr; }

  // The content is undefined.
  absl::StatusOr<std::shared_ptr<float[]>> Allocate(size_t count) const;

  // Both wait until the copy is done. Read runs after the fence, which may be null.
  absl::Status Read(const float* from, const Fence* after, std::span<float> to) const;
  absl::Status Write(std::span<const float> from, float* to) const;

 private:
  std::shared_ptr<Device> device_;
};

// UndoLog: a bucket's residuals and other kept arrays as they were before its last use. A use that
// failed half-way has encoded some chunks and not others; undoing it as a whole makes it as if it
// had not run. Thread-safe: the chunks of a use save disjoint ranges.
class UndoLog {
 public:
  using Arrays = absl::InlinedVector<std::shared_ptr<float[]>, 2>;

  // Space for as many floats as the residuals and each array have, in the same kind of memory.
  UndoLog(std::shared_ptr<float[]> residual, Arrays arrays, bool on_device)
      : residual_(std::move(residual)),
        arrays_(std::move(arrays)),
        on_device_(on_device),
        arrays_saved_(arrays_.size()) {}

  // Call when a use begins: the one before it can't be undone any more.
  void Begin();

  // Call before a chunk changes these elements of the bucket's residuals and arrays; null: not
  // changed. On a device it is queued on the stream of `backend`.
  void Save(const Backend& backend, Range elements, const float* residual,
            std::span<const float* const> arrays);
  // The same if only the first array, the momentum, may change.
  void Save(const Backend& backend, Range elements, const float* residual, const float* momentum) {
    Save(backend, elements, residual, std::span<const float* const>(&momentum, 1));
  }

  // Restores what the last use has saved, after the fence, which may be null; once. `residual` and
  // `arrays` are the whole bucket's, of `numel` floats. No use may be in flight.
  absl::Status Restore(const FloatMemory& memory, const Fence* after, size_t numel, float* residual,
                       const Arrays& arrays);

 private:
  const std::shared_ptr<float[]> residual_;
  const Arrays arrays_;
  const bool on_device_;
  absl::Mutex mu_;
  std::vector<Range> residuals_saved_ ABSL_GUARDED_BY(mu_);
  std::vector<std::vector<Range>> arrays_saved_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_FLOAT_MEMORY_H_
