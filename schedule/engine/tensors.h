// Whose chunks the engine carries:
//
//   Bucket        a tensor that is reduced again and again, described once
//   Use           one use of a bucket, which its caller waits for
//   Tensors       all names that the engine has heard of, and the uses in flight
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

// Immutable once it is shared.
class Bucket {
 public:
  // The request has been checked. With Matching::kByOrder small tensors go in order as well.
  Bucket(const BucketRequest& request, const Membership& members, Matching matching,
         const Options& options);

  // Finds how much memory its chunks take on a device. To be called before it is shared.
  void Rehearse(const Options& options, const Membership& members, const Device& device);

  // All of a chunk's job that follows from the bucket, the step and what is kept of the bucket
  // (null: nothing); tag, tensors and absent elements are the use's.
  ChunkJob JobOf(uint32_t chunk, uint64_t step, const BucketMemory* kept,
                 const Options& options) const;

  // True if the request describes this very bucket.
  bool Matches(const BucketRequest& request) const;

  bool named() const { return !key_.empty(); }
  bool needs_memory() const { return named() && needs_memory_; }

  const std::string& key() const { return key_; }
  const Partition& partition() const { return partition_; }
  const BucketLayout& layout() const { return layout_; }
  const Report& report() const { return report_; }  // of call 0
  // The most that any of its chunks takes, in any step, with any parameters absent.
  const ChunkMemory& chunk_memory() const { return chunk_memory_; }
  Collective collective() const { return collective_; }
  size_t output_numel() const { return output_numel_; }
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
  const std::string key_;
  const Collective collective_;
  const size_t output_numel_;
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

class Use;
using UsePtr = std::shared_ptr<Use>;

// One use of a bucket, from its submission until its memory is the caller's again: the caller has
// it to wait for. Dropping it does not cancel the collective. A named bucket uses its object again
// once nobody else holds it.
class Use final : public std::enable_shared_from_this<Use> {
 public:
  // Fixed before any other thread sees them.
  std::shared_ptr<const Bucket> bucket;
  std::string label;  // the tensor's name in messages
  TensorView input, output;
  std::shared_ptr<Device> device;      // null: the host
  void* stream = nullptr;              // the caller's
  std::shared_ptr<DeviceEvent> ready;  // on a device: the caller's work on the input
  std::shared_ptr<Fence> fence;        // the engine's on input, output, residual and momentum
  std::shared_ptr<const BucketMemory> memory;  // while it is in flight; null: nothing is kept
  // The same between uses. It does not keep it: residuals that somebody holds can't move to another
  // bucket, and once they have moved this is empty.
  std::weak_ptr<const BucketMemory> bound;
  std::vector<Range> absent;  // elements, in the partition's order, that this rank has nothing for
  uint64_t step = 0;
  float divisor = 0.0f;  // of the mean, in place of the bucket's; 0: the bucket's
  Report report;
  Deadline submitted, deadline;
  Executor* helper = nullptr;  // finishes a small tensor for whoever waits; null: lanes do

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

  // Returns within the group's timeout and a short grace. On the host the result is there then; on
  // a device it is there for later work of the stream that the call was made with.
  absl::Status Wait() { return WaitOn(stream); }
  // The same, but for later work of this stream (a cudaStream_t); on the host as Wait.
  absl::Status WaitOn(void* stream);
  bool done() const;

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

// Thread-safe.
class Tensors {
 public:
  Tensors(const Options& options, const Membership& members, Matching matching,
          std::shared_ptr<Device> device, size_t fence_slots);

  // The bucket of this description: the one that is there already, or a new one.
  struct Registered {
    std::shared_ptr<const Bucket> bucket;
    bool is_new;
  };
  Registered Register(const BucketRequest& request);

  // Puts one use of the bucket, which Register has returned, in flight. InvalidArgument if the name
  // is in flight already, or another tensor in flight has a parameter of it; after Close the reason
  // that was given there.
  absl::StatusOr<UsePtr> Begin(const std::shared_ptr<const Bucket>& bucket,
                               const Submission& submission);
  // Takes the use out of flight; once.
  void Remove(Use& use);

  // Nothing begins any more. Returns the uses that the caller is to retire.
  std::vector<UsePtr> Close(const absl::Status& reason);

  bool idle() const;
  // The step that the next use of every name is.
  void SetStep(uint64_t step);

  // For reading and writing residuals while nothing is in flight, which the caller sees to.
  ErrorFeedback& feedback() { return feedback_; }

  // The uses in flight, for people: a line each.
  std::string Describe() const;

 private:
  // A name, and what is kept of it between its uses. Buckets may be described anew under it. The
  // empty name is that of all tensors without one, which may be in flight at the same time.
  struct Name {
    std::shared_ptr<const Bucket> bucket = {};  // the newest description
    bool claimed = false;                       // in flight
    uint64_t calls = 0;
    uint64_t step = 0;  // of the next use
    UsePtr last = {};   // used again when nobody else holds it
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
  // One caller at a time has it, who holds no lock, since it may wait for a device meanwhile.
  ErrorFeedback feedback_;
  mutable absl::Mutex mu_;
  bool feedback_is_free_ ABSL_GUARDED_BY(mu_) = true;
  uint64_t first_step_ ABSL_GUARDED_BY(mu_) = 0;                   // of new names
  std::unordered_map<uint64_t, Name> names_ ABSL_GUARDED_BY(mu_);  // by hash; none goes
  RecycledMap<UsePtr> in_flight_ ABSL_GUARDED_BY(mu_);             // by id
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TENSORS_H_
