// ErrorFeedback: the residuals of one rank, kept by parameter and element range, so that they
// survive a framework's re-bucketing, a checkpoint, and a change of world size.
// Error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, section 3;
// both hops: Tang et al., "DoubleSqueeze", arXiv 1905.05957, algorithm 1.
#ifndef THINWIRE_COMPRESS_ERROR_FEEDBACK_H_
#define THINWIRE_COMPRESS_ERROR_FEEDBACK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "compress/float_memory.h"
#include "compress/range.h"
#include "compress/undo_log.h"

namespace thinwire {

// Elements [offset, offset + count) of parameter `name`, which has `total` elements.
struct Segment {
  std::string name;
  size_t offset = 0;
  size_t count = 0;
  size_t total = 0;
  uint32_t codec = 0;  // of the engine's codecs; no matter to residuals
  friend bool operator==(const Segment&, const Segment&) = default;
};

// How a bucket is laid out and which of its elements this rank owns (reduces).
struct BucketLayout {
  std::vector<Segment> segments;  // one after another
  std::vector<Range> owned;       // ascending, disjoint
  // Second-hop residual times this = gradient units: n where the result is a mean, 1 for a sum.
  float second_hop_weight = 1.0f;
  bool momentum = false;  // momentum is kept beside the residuals
  size_t carried = 0;     // floats of the bucket's own, which no other layout takes over
  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;
};

// All that is kept of a parameter in plain form, `total` floats each.
struct ParameterResidual {
  std::vector<float> first;     // first hop, gradient units; zero where this rank owns the element
  std::vector<float> second;    // second hop, units of the result; zero elsewhere
  std::vector<float> momentum;  // empty: none is kept
  float second_hop_weight = 1.0f;
};

// All that is kept of a bucket: one float for each element. Null means nothing.
struct BucketMemory {
  std::shared_ptr<float[]> residual;
  std::shared_ptr<float[]> momentum;
  std::shared_ptr<float[]> carried;  // zeros at first
  std::shared_ptr<Fence> fence;      // on a device: the work that used them last
  std::shared_ptr<UndoLog> undo;     // null: a use can't be taken back
};

// Not thread-safe; the engine serialises Bind, and chunks write disjoint ranges of what it returns.
class ErrorFeedback {
 public:
  // On the host, or on a device, whose memory up to `slots` streams use at once. `undo`: uses can
  // be taken back, which takes as much memory again.
  explicit ErrorFeedback(std::shared_ptr<Device> device = nullptr, size_t slots = 0,
                         bool undo = false)
      : memory_(std::move(device)), slots_(slots), undo_(undo) {}

  // The residuals of a bucket: one float an element. Where this rank owns the element it is the
  // second-hop residual, elsewhere the first-hop one. (An owned element has no first-hop residual:
  // it enters the sum unquantised.) With an unchanged layout this is a look-up; else every
  // parameter moves to its new place, from whatever bucket held it, and a residual whose hop
  // changes is converted by second_hop_weight, so that nothing is lost. FailedPrecondition, and
  // nothing changed, if somebody still holds the memory of a bucket that would have to give
  // elements up; a device's failure otherwise.
  absl::StatusOr<BucketMemory> Bind(std::string_view bucket, const BucketLayout& layout);

  // Grows whenever residuals move to another bucket or are imported. While it stays, what Bind has
  // returned for a bucket is what Bind would return again. From 1.
  uint64_t generation() const { return generation_; }

  std::vector<std::string> Names() const;     // of parameters, sorted
  size_t Numel(std::string_view name) const;  // 0 if unknown
  // InvalidArgument for an unknown name.
  absl::Status Export(std::string_view name, ParameterResidual* out) const;
  // Takes effect at the next Bind of a bucket that holds the parameter. FailedPrecondition while
  // somebody holds its present residuals.
  absl::Status Import(std::string_view name, ParameterResidual residual);

  // Takes back what the last use of every bucket has changed, whether it was done or failed
  // half-way. A second call does nothing, nor does one without `undo`. FailedPrecondition while
  // somebody holds residuals; a device's failure otherwise.
  absl::Status Undo();

 private:
  struct Bucket {
    BucketLayout layout;
    BucketMemory memory;
  };
  using Parameters = std::map<std::string, ParameterResidual, std::less<>>;
  // A bucket's floats on the host.
  struct Floats {
    std::vector<float> residual, momentum;
  };
  absl::StatusOr<BucketMemory> AllocateKept(const BucketLayout& layout) const;
  absl::StatusOr<BucketMemory> Allocate(const BucketLayout& layout) const;
  absl::StatusOr<Floats> Fetch(const Bucket& bucket) const;
  absl::Status Unload(const Bucket& bucket, Parameters* into) const;
  Floats Load(const BucketLayout& layout);
  absl::Status ReleaseHoldersOf(std::string_view bucket, const BucketLayout& layout);

  const FloatMemory memory_;
  const size_t slots_ = 0;
  const bool undo_ = false;
  uint64_t generation_ = 1;
  std::map<std::string, Bucket, std::less<>> buckets_;
  Parameters parked_;  // what is in no bucket at the moment
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ERROR_FEEDBACK_H_
