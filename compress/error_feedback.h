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

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "compress/float_memory.h"
#include "compress/types.h"

namespace thinwire {

// Elements [offset, offset + count) of parameter `name`, which has `total` elements.
struct Segment {
  std::string name;
  size_t offset = 0;
  size_t count = 0;
  size_t total = 0;
  uint32_t codec = 0;  // index among the engine's codecs; ignored here
  friend bool operator==(const Segment&, const Segment&) = default;
};

// Names of kept arrays. A parameter's residual is kept as two arrays, one per hop; every other
// array has one float per element and moves with its parameter unchanged.
inline constexpr std::string_view kFirstHop = "first", kSecondHop = "second";
inline constexpr std::string_view kMomentum = "momentum";

// How a bucket is laid out and which of its elements this rank owns (reduces).
struct BucketLayout {
  std::vector<Segment> segments;  // one after another, without overlap
  std::vector<Range> owned;       // ascending, disjoint
  // Second-hop residual times this = gradient units: n if the result is a mean, 1 for a sum.
  float second_hop_weight = 1.0f;
  std::vector<std::string> arrays;  // kept beside the residual, such as kMomentum; initially zeros
  size_t carried = 0;               // floats that belong to the bucket; a new layout drops them
  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;
};

// All that is kept of a parameter, as plain arrays of `total` floats each.
struct ParameterResidual {
  using Arrays = std::map<std::string, std::vector<float>, std::less<>>;

  std::vector<float> first;   // first hop, gradient units; zero where this rank is the owner
  std::vector<float> second;  // second hop, units of the result; zero where it is not
  Arrays arrays;              // by name; only those that are kept
  float second_hop_weight = 1.0f;

  std::vector<float> array(std::string_view name) const {  // empty if it is not kept
    const auto found = arrays.find(name);
    return found == arrays.end() ? std::vector<float>() : found->second;
  }
};

// One kept array of one parameter, in the caller's memory: a float for each element.
struct StateArray {
  std::string_view parameter;
  std::string_view array;  // kFirstHop, kSecondHop, or another name
  std::span<float> values;
};

// All that is kept of a bucket: one float for each element. Null arrays are not kept. Shared by
// ErrorFeedback and the bucket's use; ErrorFeedback drops it when elements move to another bucket.
struct BucketMemory {
  // Two fit without an allocation: most buckets keep momentum or nothing.
  using Arrays = absl::InlinedVector<std::shared_ptr<float[]>, 2>;

  std::shared_ptr<float[]> residual;
  Arrays arrays;                     // in the order of BucketLayout::arrays
  std::shared_ptr<float[]> carried;  // initially zeros
  std::shared_ptr<Fence> fence;      // on a device: the last work that used them
  std::shared_ptr<UndoLog> undo;     // null: a use can't be undone

  float* array(size_t i) const { return i < arrays.size() ? arrays[i].get() : nullptr; }
};

// Not thread-safe; the engine serialises Bind, and chunks write disjoint ranges of its result.
class ErrorFeedback {
 public:
  // A parameter that has been bound or imported.
  struct Known {
    std::string name;
    size_t numel = 0;
  };

  // On the host, or on a device, whose memory is used by up to `slots` streams at once. With
  // `undo`, uses can be undone, which doubles the memory.
  explicit ErrorFeedback(std::shared_ptr<Device> device = nullptr, size_t slots = 0,
                         bool undo = false)
      : memory_(std::move(device)), slots_(slots), undo_(undo) {}

  // Returns the residuals of a bucket: one float per element. Where this rank owns the element it
  // is the second-hop residual, elsewhere the first-hop one. (An owned element has no first-hop
  // residual: it enters the sum unquantised.) With an unchanged layout this is a look-up; otherwise
  // every parameter moves to its new place, from whatever bucket held it, and a residual whose hop
  // changes is converted by second_hop_weight, so that nothing is lost. FailedPrecondition, with
  // nothing changed, if the memory of a bucket that would lose elements is still in use; a device's
  // failure otherwise. As long as the returned memory lives, calls for this bucket and layout
  // return the same memory.
  absl::StatusOr<std::shared_ptr<const BucketMemory>> Bind(std::string_view bucket,
                                                           const BucketLayout& layout);

  const std::vector<Known>& parameters() const { return known_; }  // sorted by name
  size_t Numel(std::string_view name) const;                       // 0 if unknown

  // Writes these arrays; zeros if an array is not kept. Every bucket is read once, however many
  // parameters it has, so the time is linear in the elements. InvalidArgument for an unknown
  // parameter or a wrong number of elements, before anything is written.
  absl::Status Export(std::span<const StateArray> arrays) const;
  // Replaces all that is kept of the parameters that these arrays name; their arrays that are not
  // given become zeros. Takes effect at the next Bind of a bucket that holds the parameter.
  // FailedPrecondition while the present memory is in use, InvalidArgument for a wrong number of
  // elements; both change nothing.
  absl::Status Import(std::span<const StateArray> arrays, float second_hop_weight);

  // The same for all arrays of one parameter.
  absl::Status Export(std::string_view name, ParameterResidual* out) const;
  absl::Status Import(std::string_view name, ParameterResidual residual);

  // Undoes the changes of the last use of every bucket, whether it was completed or failed
  // half-way. A second call does nothing, nor does a call without `undo`. FailedPrecondition while
  // residuals are in use; a device's failure otherwise.
  absl::Status Undo();

 private:
  struct Bucket {
    BucketLayout layout;
    std::shared_ptr<const BucketMemory> memory;
  };
  using Parameters = std::map<std::string, ParameterResidual, std::less<>>;
  using NameSet = absl::flat_hash_set<std::string_view>;

  absl::StatusOr<BucketMemory> Allocate(const BucketLayout& layout) const;
  absl::Status AllocateKept(const BucketLayout& layout, BucketMemory* memory) const;
  absl::Status Fill(const BucketLayout& layout, const BucketMemory& memory);
  absl::Status Unload(const Bucket& bucket, const NameSet& dropped);
  absl::Status ReleaseHoldersOf(std::string_view bucket, const BucketLayout& layout,
                                const NameSet& dropped);
  const Known* Find(std::string_view name) const;  // null if unknown
  void Learn(const BucketLayout& layout);

  const FloatMemory memory_;
  const size_t slots_ = 0;
  const bool undo_ = false;
  std::map<std::string, Bucket, std::less<>> buckets_;
  Parameters parked_;         // what is in no bucket now
  std::vector<Known> known_;  // sorted by name
};

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_ERROR_FEEDBACK_H_
