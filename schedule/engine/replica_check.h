// ReplicaCheck: whether all ranks got the same bits. In every `every`-th step each rank takes a
// digest of each result, before the result becomes the caller's, who may change it; the lanes do it
// chunk by chunk, while other chunks are still on the wire. Digests go to rank 0 on the control
// channel, where nobody waits for them. A difference fails the group on every rank.
#ifndef THINWIRE_SCHEDULE_ENGINE_REPLICA_CHECK_H_
#define THINWIRE_SCHEDULE_ENGINE_REPLICA_CHECK_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/failure.h"
#include "schedule/engine/use.h"
#include "schedule/order/frames.h"
#include "transport/control_plane.h"

namespace thinwire {

// Thread-safe.
class ReplicaCheck {
 public:
  // `every`: 0 means never. References outlive it; `control` is null in a world of one.
  ReplicaCheck(const Membership& members, uint64_t every, ControlPlane* control,
               FailureProtocol& failure);

  // A chunk's result lies in the work's output, and the work is not complete.
  void OnChunk(Use& work, uint32_t chunk) const;
  // All chunks' do.
  void OnDone(const Use& work);
  // On rank 0: what a rank has got.
  void OnDigest(int from, const DigestNote& note);

 private:
  // One result; digests by rank.
  struct Round {
    std::vector<uint64_t> digests;
    std::vector<bool> there;
  };
  bool IsDue(const Use& work) const;
  absl::Status Judge(const DigestNote& note, const std::vector<uint64_t>& digests) const;

  const Membership members_;
  const uint64_t every_;
  ControlPlane* const control_;
  FailureProtocol& failure_;
  absl::Mutex mu_;
  std::map<uint64_t, Round> rounds_ ABSL_GUARDED_BY(mu_);  // rank 0's, by id of the use
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_REPLICA_CHECK_H_
