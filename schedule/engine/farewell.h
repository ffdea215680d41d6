// Farewell: how a group ends in order. A rank that closes says goodbye, with the number of
// collectives that it has started, and waits a while for its peers' goodbyes: a rank may have all
// that it wants while its peers still exchange their last chunk, and a closed connection would look
// like a lost peer to them. A collective that a peer's goodbye does not count will never finish, so
// it fails the group at once.
#ifndef THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_
#define THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/failure.h"
#include "transport/membership.h"

namespace thinwire {

// Thread-safe.
class Farewell {
 public:
  // `failure` outlives it.
  Farewell(const Membership& members, FailureProtocol& failure)
      : members_(members), failure_(failure) {}

  // This rank has started its collective number `started`, from 1.
  void OnStarted(uint64_t started);
  // A peer closes. It has started as many collectives as `started` says.
  void OnBye(int from, uint64_t started);
  // Nobody is heard from here on. That is no failure after the own goodbye, since a peer that has
  // heard everybody's goodbye leaves, maybe before this rank has heard them all.
  void OnControlLost(const absl::Status& reason);

  // Says goodbye, and waits a while for everybody's.
  void Say();

 private:
  bool AllHaveSaid() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return byes_ == members_.size - 1; }
  bool IsCut() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return byes_ > 0 && started_ > counted_; }
  absl::Status Reason() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Membership members_;
  FailureProtocol& failure_;
  absl::Mutex mu_;
  uint64_t started_ ABSL_GUARDED_BY(mu_) = 0;
  bool said_ ABSL_GUARDED_BY(mu_) = false;
  int byes_ ABSL_GUARDED_BY(mu_) = 0;          // peers that have said goodbye
  int first_ ABSL_GUARDED_BY(mu_) = 0;         // of them: the one that started the least
  uint64_t counted_ ABSL_GUARDED_BY(mu_) = 0;  // what that one started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_
