// The tensors whose chunks the engine runs:
//
//   Bucket        a tensor that is reduced again and again, described once
//   Use           one use of a bucket, which its caller waits for
//   Tensors       all registered names, and the uses in flight
#ifndef THINWIRE_SCHEDULE_ENGINE_TENSORS_H_
#define THINWIRE_SCHEDULE_ENGINE_TENSORS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/error_feedback.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "schedule/containers.h"
#include "schedule/engine/workspaces.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/request.h"
#include "transport/membership.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

// The way a bucket takes through the engine.
enum class Route : uint8_t {
  kLocal,    // a world of one: on the caller's thread
  kDirect,   // small: sent at once, outside the order
  kOrdered,  // chunk by chunk, in the order of the sequencer
};

class Executor;

// Immutable once shared.
class Bucket {
 public:
  // The request must have passed CheckBucket. With Matching::kByOrder small tensors go in order.
  Bucket(const BucketRequest& request, const Membership& members, Matching matching,
         const Options& options);

  // Finds how much memory its chunks take on a device. Call before the bucket is shared.
  void Rehearse(const Options& options, const Membership& members, const Device& device);

  // The parts of a chunk's job that follow from the bucket, the step and the bucket's kept memory
  // (null: none). The use adds tag, tensors and absent elements.
  ChunkJob JobOf(uint32_t chunk, uint64_t step, const BucketMemory* kept,
                 const Options& options) const;

  // True if the request describes this bucket.
  bool Matches(const BucketRequest& request) const;

  bool named() const { return !key_.empty(); }
  bool needs_memory() const { return named() && needs_memory_; }

  const std::string& key() const { return key_; }
  const Partition& partition() const { return partition_; }
  const BucketLayout& layout() const { return layout_; }
  const Report& report() const { return report_; }  // with call 0
  // The most memory that any of its chunks takes, in any step, with any parameters absent.
  const ChunkMemory& chunk_memory() const { return chunk_memory_; }
  Collective collective() const { return collective_; }
  size_t output_numel() const { return output_numel_; }
  Route route() const { return route_; }
  size_t segments() const { return segments_.size(); }
  const std::string& shape() const { return shape_; }  // empty: not compared
  // The tag of the exchanges of a chunk of the use `id`. Ranks that describe the bucket differently
  // have different tags, so their exchanges never match; a direct tensor is then late, is reported,
  // and fails with the difference.
  uint64_t TagOf(uint64_t id, uint32_t chunk) const;
  float scale() const { return scale_; }
  // Ranges of the segments with these indices, in the order of the kept memory.
  void RangesOf(std::span<const uint32_t> segments, std::vector<Range>* ranges) const;

 private:
  const std::string key_;
  const Collective collective_;
  const size_t output_numel_;
  const std::vector<Segment> segments_;  // as requested; if none, one segment for the whole key
  const bool whole_;                     // no segments were given
  const std::string shape_;
  const Partition partition_;
  const Route route_;
  const float scale_;
  bool needs_memory_ = false;
  BucketLayout layout_;
  Report report_;
  ChunkMemory chunk_memory_;
  uint64_t agreed_ = 0;  // hash of everything that ranks must agree on
};

class Use;
using UsePtr = std::shared_ptr<Use>;

// One use of a bucket, from its submission until its memory belongs to the caller again. The caller
// waits for it. Dropping it does not cancel the collective. A named bucket reuses it once nobody
// else holds it.
class Use final : public std::enable_shared_from_this<Use> {
 public:
  // Set before any other thread sees the use.
  std::shared_ptr<const Bucket> bucket;
  std::string label;  // the tensor's name, for messages
  TensorView input, output;
  std::shared_ptr<Device> device;      // null: the host
  void* stream = nullptr;              // the caller's
  std::shared_ptr<DeviceEvent> ready;  // on a device: end of the caller's work on the input
  std::shared_ptr<Fence> fence;        // the engine's work on input, output, residual and momentum
  std::shared_ptr<const BucketMemory> memory;  // set while in flight; null: nothing is kept
  // The same memory, between uses. Weak, since residuals that are held can't move to another
  // bucket; once they have moved this is empty.
  std::weak_ptr<const BucketMemory> bound;
  std::vector<Range> absent;  // elements without a gradient here, in the partition's order
  uint64_t step = 0;
  float divisor = 0.0f;  // replaces the bucket's; 0: the bucket's
  Report report;
  Deadline submitted, deadline;
  Executor* helper = nullptr;  // lets a waiting caller finish a small tensor; null: lanes do it

  uint64_t id() const { return report.id(); }

  // The job of this use for one of the bucket's chunks.
  ChunkJob JobOf(uint32_t chunk, const Options& options) const;

  // Resets the object for the next use. Nobody else may hold it.
  void Renew();

  // A thread begins work on a chunk; false if the group has failed.
  bool BeginChunk();
  // kDone: all chunks are done. kFailed: the group has failed, and no thread is working on a chunk
  // any more. A caller that gets one of these must retire the use.
  enum class Left { kSome, kDone, kFailed };
  Left EndChunk(bool ok);
  // The group has failed: no chunk begins from now on. True if the caller must retire the use,
  // since no thread is working on it.
  bool Close();

  // Ends the use with `status`: its memory belongs to the caller again.
  void Complete(absl::Status status);

  // Returns within the group's timeout and a short grace. On the host the result is then complete;
  // on a device it is complete for later work of the stream that the tensor was submitted with.
  absl::Status Wait() { return WaitOn(stream); }
  // The same for later work of `stream` (a cudaStream_t); on the host the same as Wait.
  absl::Status WaitOn(void* stream);
  bool done() const;

  // One human-readable line.
  std::string Describe(Deadline now) const;

 private:
  mutable absl::Mutex mu_;
  size_t chunks_left_ ABSL_GUARDED_BY(mu_) = 0;
  int chunks_running_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// The use that was given to the sequencer, which returns it with each of its chunks.
inline Use& UseOf(const StartChunk& start) { return *static_cast<Use*>(start.host.get()); }

// Thread-safe.
class Tensors {
 public:
  Tensors(const Options& options, const Membership& members, Matching matching,
          std::shared_ptr<Device> device, size_t fence_slots);

  // Returns the bucket of this description: the registered one, or a new one.
  struct Registered {
    std::shared_ptr<const Bucket> bucket;
    bool is_new;
  };
  Registered Register(const BucketRequest& request);

  // Puts one use of the bucket, which Register has returned, in flight. InvalidArgument if the name
  // is in flight already, or another tensor in flight has a parameter of it; after Close: the
  // reason given there.
  absl::StatusOr<UsePtr> Begin(const std::shared_ptr<const Bucket>& bucket,
                               const Submission& submission);
  // Takes the use out of flight. Call once per use.
  void Remove(Use& use);

  // Begins no more uses. Returns the uses that the caller must retire.
  std::vector<UsePtr> Close(const absl::Status& reason);

  bool idle() const;
  // Sets the step of the next use of every name.
  void SetStep(uint64_t step);

  // For reading and writing residuals. The caller must ensure that nothing is in flight.
  ErrorFeedback& feedback() { return feedback_; }

  // Human-readable: the uses in flight, one per line.
  std::string Describe() const;

 private:
  // A name, and its state between uses. Other buckets may be registered under it later. All tensors
  // without a name share the empty name; several of them may be in flight at once.
  struct Name {
    std::shared_ptr<const Bucket> bucket = {};  // the newest description
    bool claimed = false;                       // in flight
    uint64_t calls = 0;
    uint64_t step = 0;  // of the next use
    UsePtr last = {};   // reused when nobody else holds it
  };

  Name& NameOf(const Bucket& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return names_.find(bucket.report().key)->second;
  }
  UsePtr Claim(const std::shared_ptr<const Bucket>& bucket);
  absl::Status Prepare(const Submission& submission, Use& use);
  absl::Status Bind(Use& use);
  absl::Status Commit(const UsePtr& use);
  void Number(Use& use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Membership members_;
  const Matching matching_;
  const std::shared_ptr<Device> device_;  // null: the host
  const size_t fence_slots_;
  // Used by one caller at a time (feedback_is_free_), without mu_, since it may wait for a device.
  ErrorFeedback feedback_;
  mutable absl::Mutex mu_;
  bool feedback_is_free_ ABSL_GUARDED_BY(mu_) = true;
  uint64_t first_step_ ABSL_GUARDED_BY(mu_) = 0;                   // the first step of new names
  std::unordered_map<uint64_t, Name> names_ ABSL_GUARDED_BY(mu_);  // by hash; never erased
  RecycledMap<UsePtr> in_flight_ ABSL_GUARDED_BY(mu_);             // by id
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TENSORS_H_
