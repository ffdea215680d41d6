// Bucket: a tensor that is reduced again and again, described once. Immutable once it is shared.
#ifndef THINWIRE_SCHEDULE_ENGINE_BUCKET_H_
#define THINWIRE_SCHEDULE_ENGINE_BUCKET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "schedule/collective/partition.h"
#include "schedule/engine/chunk_memory.h"
#include "schedule/order/frames.h"
#include "schedule/request.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

// The way a bucket takes through the engine.
enum class Route : uint8_t {
  kLocal,    // a world of one: on the caller's thread
  kDirect,   // small: sent at once, outside the order
  kOrdered,  // chunk by chunk, in the order of the sequencer
};

class NamedTensor;

class Bucket {
 public:
  // One float for each element, as ErrorFeedback has bound them; null means none.
  struct Kept {
    float* residual = nullptr;
    float* momentum = nullptr;
    float* carried = nullptr;  // one for each chunk
  };

  // The request has been checked. `tensor` has its name, and outlives it. With Matching::kByOrder
  // small tensors go in order as well.
  Bucket(const BucketRequest& request, NamedTensor& tensor, const Membership& members,
         Matching matching, const Options& options);

  // Finds how much memory its chunks take on a device. To be called before it is shared.
  void Rehearse(const Options& options, const Membership& members, const Device& device);

  // All of a chunk's job that follows from the bucket and the step; tag, tensors, undo log and
  // absent elements are the use's.
  ChunkJob JobOf(uint32_t chunk, uint64_t step, const Kept& kept, const Options& options) const;

  // True if the request describes this very bucket.
  bool Matches(const BucketRequest& request) const;

  bool named() const { return !key_.empty(); }
  bool needs_memory() const { return named() && needs_memory_; }

  NamedTensor& tensor() const { return tensor_; }
  const std::string& key() const { return key_; }
  const Partition& partition() const { return partition_; }
  const BucketLayout& layout() const { return layout_; }
  const Report& report() const { return report_; }  // of call 0
  // The most that any of its chunks takes, in any step, with any parameters absent.
  const ChunkMemory& chunk_memory() const { return chunk_memory_; }
  Collective collective() const { return collective_; }
  Route route() const { return route_; }
  size_t segments() const { return segments_.size(); }
  const std::string& shape() const { return shape_; }  // empty: it is not compared
  // The tag of the exchanges of a chunk of the use `id`. Ranks that describe the bucket differently
  // never meet; those of a direct exchange are then late, and report what they have.
  uint64_t TagOf(uint64_t id, uint32_t chunk) const;
  float scale() const { return scale_; }
  // Where segments with these numbers lie in the order of what is kept.
  void RangesOf(std::span<const uint32_t> segments, std::vector<Range>* ranges) const;

 private:
  NamedTensor& tensor_;
  const std::string key_;
  const Collective collective_;
  const std::vector<Segment> segments_;  // as requested; one of the whole key if none were
  const bool whole_;                     // no segments were given
  const std::string shape_;
  const Partition partition_;
  const Route route_;
  const float scale_;
  bool needs_memory_ = false;
  BucketLayout layout_;
  Report report_;
  ChunkMemory chunk_memory_;
  uint64_t agreed_ = 0;  // hash of all that ranks must agree on
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_BUCKET_H_
