// Tensors: the names that an engine has heard of, with all that is kept of them, and the uses in
// flight.
#ifndef THINWIRE_SCHEDULE_ENGINE_TENSORS_H_
#define THINWIRE_SCHEDULE_ENGINE_TENSORS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/error_feedback.h"
#include "schedule/engine/bucket.h"
#include "schedule/options.h"
#include "schedule/recycled.h"
#include "transport/membership.h"

namespace thinwire {

// A name, and what is kept of it between its uses. Buckets may be described anew under it. The
// empty name is that of all tensors without one, which may be in flight at the same time.
// Thread-safe.
class NamedTensor {
 public:
  explicit NamedTensor(uint64_t step) : step_(step) {}

  // The newest description, if it is this one; null otherwise.
  std::shared_ptr<const Bucket> Find(const BucketRequest& request) const;
  void SetBucket(const std::shared_ptr<const Bucket>& bucket);

  // A use of the bucket, which nobody else sees; null if the name is in flight already. Release
  // ends the claim.
  UsePtr Claim(const std::shared_ptr<const Bucket>& bucket);
  void Release();

  // Gives the use its number and its step. Every use that other ranks hear of has one.
  void Number(Use& use);
  // The step of the next use.
  void SetStep(uint64_t step);

 private:
  mutable absl::Mutex mu_;
  std::shared_ptr<const Bucket> bucket_ ABSL_GUARDED_BY(mu_);
  bool claimed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t step_ ABSL_GUARDED_BY(mu_);
  UsePtr last_ ABSL_GUARDED_BY(mu_);  // used again when nobody else holds it
};

// A turn is like a lock, but for callers who may wait for a device meanwhile.
class ABSL_LOCKABLE Turn {
 public:
  void Enter() ABSL_EXCLUSIVE_LOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Exit() ABSL_UNLOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS;

 private:
  absl::Mutex mu_;
  bool free_ ABSL_GUARDED_BY(mu_) = true;
};

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
  ErrorFeedback& feedback() ABSL_NO_THREAD_SAFETY_ANALYSIS { return feedback_; }

  // The uses in flight, for people: a line each.
  std::string Describe() const;

 private:
  absl::Status Prepare(const Submission& submission, Use& use);
  absl::Status Bind(Use& use);
  absl::StatusOr<BucketMemory> BindInTurn(const Bucket& bucket, BoundMemory& bound)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  absl::Status Commit(const UsePtr& use);

  const Options options_;
  const Membership members_;
  const Matching matching_;
  const std::shared_ptr<Device> device_;  // null: the host
  const size_t fence_slots_;
  Turn turn_;
  ErrorFeedback feedback_ ABSL_GUARDED_BY(turn_);
  mutable absl::Mutex mu_;
  uint64_t first_step_ ABSL_GUARDED_BY(mu_) = 0;                          // of new names
  std::unordered_map<uint64_t, NamedTensor> names_ ABSL_GUARDED_BY(mu_);  // by hash; none goes
  RecycledMap<UsePtr> in_flight_ ABSL_GUARDED_BY(mu_);                    // by id
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TENSORS_H_
