// Farewell: how a group ends in order. A rank that closes says goodbye, with the number of
// collectives that it has started, and waits until its peers have finished these as well: a rank
// may have all that it wants while its peers still exchange their last chunk, and a closed
// connection would look like a lost peer to them. A peer that still works says so when it is asked,
// and is waited for; one that answers nothing has stopped, and is not. A collective that a peer's
// goodbye does not count will never finish, so it fails the group at once.
#ifndef THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_
#define THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_

#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "schedule/engine/failure.h"
#include "schedule/order/peers.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

// Thread-safe.
class Farewell {
 public:
  // References outlive it; `control` is null in a world of one. timeout: the group's, within which
  // every collective that was started ends.
  Farewell(const Membership& members, std::chrono::milliseconds timeout, ControlPlane* control,
           FailureProtocol& failure);

  // This rank has started its collective number `started`, from 1.
  void OnStarted(uint64_t started);
  // One of them is done.
  void OnFinished();
  // A peer closes. It has started as many collectives as `started` says.
  void OnBye(int from, uint64_t started);
  // A peer has finished all that this rank's goodbye counts.
  void OnByeHeard(int from);
  // A peer answers, and may be at work still.
  void OnPong(int from);
  // Nobody is heard from here on. That is no failure after the own goodbye, since a peer that has
  // heard everybody's goodbye leaves, maybe before this rank has heard them all.
  void OnControlLost(const absl::Status& reason);

  // Says goodbye, and waits until nobody needs this rank any more, or can't be heard.
  void Say();

 private:
  struct Peer {
    bool parted = false;         // it has said goodbye, and is to be told once
    uint64_t counts = 0;         // as many collectives are done here
    bool needs_nothing = false;  // of this rank
  };

  bool IsUnneeded() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool AwaitUnneeded(absl::Duration patience);
  bool AsksInVain();
  bool IsCut() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return byes_ > 0 && started_ > counted_; }
  std::vector<int> TakeFinishedFor() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellFinished(const std::vector<int>& peers);
  absl::Status Reason() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Membership members_;
  const std::chrono::milliseconds timeout_;
  ControlPlane* const control_;
  FailureProtocol& failure_;
  absl::Mutex mu_;
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mu_);  // by rank
  RollCall roll_ ABSL_GUARDED_BY(mu_);            // of those that may still need this rank
  uint64_t finished_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t started_ ABSL_GUARDED_BY(mu_) = 0;
  bool said_ ABSL_GUARDED_BY(mu_) = false;
  int byes_ ABSL_GUARDED_BY(mu_) = 0;          // peers that have said goodbye
  int first_ ABSL_GUARDED_BY(mu_) = 0;         // of them: the one that started the least
  uint64_t counted_ ABSL_GUARDED_BY(mu_) = 0;  // what that one started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_FAREWELL_H_
