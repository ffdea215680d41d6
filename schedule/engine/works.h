// Works: the registered buckets, and the works in flight, from their submission to their end.
#ifndef THINWIRE_SCHEDULE_ENGINE_WORKS_H_
#define THINWIRE_SCHEDULE_ENGINE_WORKS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/in_flight.h"
#include "schedule/engine/residual_binder.h"
#include "schedule/options.h"
#include "schedule/recycled_map.h"
#include "transport/membership.h"

namespace thinwire {

using WorkPtr = std::shared_ptr<InFlight>;

// Thread-safe.
class Works {
 public:
  Works(const Options& options, const Membership& members, Matching matching,
        std::shared_ptr<Device> device, size_t fence_slots);

  // The bucket of this description: the one that is there already, or a new one.
  struct Registered {
    std::shared_ptr<const Bucket> bucket;
    bool is_new;
  };
  Registered Register(const BucketRequest& request);

  // Puts one use of the bucket in flight. InvalidArgument if the name is in flight already, or
  // another tensor in flight has a parameter of it; after Close the reason that was given there.
  absl::StatusOr<WorkPtr> Begin(const std::shared_ptr<const Bucket>& bucket,
                                const Submission& submission);

  // The work of that id, one of whose chunks begins; null if it is over or the group has failed.
  WorkPtr BeginChunk(uint64_t id);
  // A chunk has ended. kDone: it was the last; kFailed: the group has failed and nobody else has a
  // chunk of it; the caller retires it then.
  enum class Left { kSome, kDone, kFailed };
  Left EndChunk(InFlight& work, bool ok);

  // Takes the work out of flight. False if somebody has done so before.
  bool Remove(const WorkPtr& work);

  // Nothing begins any more. Returns the works that no lane is touching, for the caller to retire.
  std::vector<WorkPtr> Close(const absl::Status& reason);

  bool idle() const;
  // The step that the next use of every name is.
  void SetStep(uint64_t step);
  ErrorFeedback& feedback() { return binder_.feedback(); }

  // Who is in flight, for people: a line each.
  std::string Describe() const;

 private:
  // All that is known of a name. Buckets may be described anew under it.
  struct Name {
    uint64_t calls = 0;
    uint64_t step = 0;
    bool in_flight = false;
    std::shared_ptr<const Bucket> bucket;
    WorkPtr spare;      // used again when nobody else holds it
    BoundMemory bound;  // of whoever has set in_flight
    std::shared_ptr<const Bucket> bound_bucket;
  };

  Name& NameOf(const Bucket& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Name*> Claim(const Bucket& bucket);
  void Unclaim(Name* name);
  absl::Status Bind(const std::shared_ptr<const Bucket>& bucket, Name* name, InFlight* work);
  WorkPtr NewWork(const std::shared_ptr<const Bucket>& bucket, Name* name);
  absl::Status Fill(const Submission& submission, InFlight* work) const;
  absl::Status Commit(Name* name, const WorkPtr& work);

  const Options options_;
  const Membership members_;
  const Matching matching_;
  const std::shared_ptr<Device> device_;  // null: the host
  const size_t fence_slots_;
  ResidualBinder binder_;
  mutable absl::Mutex mu_;
  uint64_t first_step_ ABSL_GUARDED_BY(mu_) = 0;                   // of names not yet seen
  std::unordered_map<uint64_t, Name> names_ ABSL_GUARDED_BY(mu_);  // by hash
  RecycledMap<WorkPtr> works_ ABSL_GUARDED_BY(mu_);                // by id
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_WORKS_H_
