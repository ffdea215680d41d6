// How a group ends, on every rank alike:
//
//   FailureProtocol  by a failure, with one reason
//   Farewell         in order, with goodbyes
#ifndef THINWIRE_SCHEDULE_ENGINE_ENDING_H_
#define THINWIRE_SCHEDULE_ENGINE_ENDING_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "schedule/engine/records.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/sequencer.h"
#include "transport/membership.h"
#include "transport/planes.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {

// The failure of that tensor on this rank, as every rank is told. A reason that begins with no rank
// is this one's own, such as its device's.
absl::Status OfTensor(int rank, const std::string& tensor, const absl::Status& status);

// FailureProtocol fails a group, once, for one reason, on every rank.
//
// The first reason wins. It goes to every rank directly, and every rank passes it on, so a peer's
// own word is the echo. A caller that gets an error may end its process at once, and a process that
// ends takes along what it has not sent, and what its peers have not read; so callers hear of a
// failure last: when every peer has heard of it, or can't be heard any more.
//
// A process that was stopped (by SIGSTOP, a debugger or a frozen container) finds on waking that
// its peers have given it up, and would take them for lost. So the protocol watches a beat, and
// where that has paused for a quarter of the timeout, and for half a second, the reason says so
// until a timeout after the pause. Thread-safe.
class FailureProtocol {
 public:
  enum class Tell { kEveryone, kNobody };

  // References outlive it; the transport is empty in a world of one. Of the options: the timeout,
  // of which a silent peer may cost a small part, and flight_path, where the last events go
  // with the first failure.
  FailureProtocol(const Membership& members, const Options& options, Transport& transport,
                  Records& records);

  // To be called every few milliseconds.
  void Beat(Deadline now);
  // The reason as Fail takes it at that time: if this process stood still, the words say so, and
  // peers that are gone are no lost peers but a passed deadline.
  absl::Status WithStandstill(const absl::Status& reason, Deadline now) const;

  // Takes the reason, if it is the first, and tells it to everyone or nobody. silent: how many
  // peers are known not to answer; nobody waits for their echoes.
  void Fail(absl::Status reason, Tell tell, int silent = 0);
  // An exchange of that tensor failed. A rank that fails says why and then closes its connections,
  // and its peers may notice the latter first; so a lost connection waits a moment for a better
  // reason.
  void FailFromExchange(const absl::Status& status, const std::string& tensor);

  void OnPeerFailed(absl::Status reason, int silent);         // a peer told its reason
  void OnControlLost(const absl::Status& reason, Tell tell);  // nobody is heard from here on
  void SendToAll(const ControlFrame& frame);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;  // the first reason, or OK
  absl::Status Explain(const std::string& tensor, const absl::Status& status) const;

  // True once the group has failed; false if it has not after `patience`.
  bool AwaitFailure(std::chrono::milliseconds patience) const;
  // After a failure: waits for the echoes, aborts the transport, and lets callers hear of it.
  void CarryThrough();
  // Before a failure is handed to a caller.
  void AwaitTold() const;

 private:
  int peers() const { return members_.size - 1; }
  std::chrono::duration<double> StoodStill(Deadline now) const;
  void OnEchoes(int echoes);
  void WriteFlight() const;

  bool IsEchoed() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return echoes_ + silent_ >= peers(); }
  bool MayTell() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return status_.ok() || told_; }

  const Membership members_;
  Transport& transport_;
  Records& records_;
  const std::string flight_path_;
  const std::chrono::milliseconds timeout_, standstill_;  // the least pause that counts
  const std::chrono::milliseconds echo_patience_;
  const std::chrono::milliseconds last_words_;  // for the own reason to leave
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mu_;
  mutable SteadyCondVar changed_;  // the status or the echoes
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  int echoes_ ABSL_GUARDED_BY(mu_) = 0;     // peers that have failed as well, or can't say so
  int silent_ ABSL_GUARDED_BY(mu_) = 0;     // peers that will not say so
  bool told_ ABSL_GUARDED_BY(mu_) = false;  // status_ may be handed out
  std::optional<Deadline> last_beat_ ABSL_GUARDED_BY(mu_);
  std::optional<Deadline> woke_ ABSL_GUARDED_BY(mu_);  // from the last standstill
  std::chrono::duration<double> stood_ ABSL_GUARDED_BY(mu_){0};
};

// Farewell ends a group in order. A rank that closes tells its peers, with the number of
// collectives that it has started, and waits until its peers have finished these as well: a rank
// may have all that it wants while its peers still exchange their last chunk, and a closed
// connection would look like a lost peer to them. A peer that still works says so when it is asked,
// and is waited for; one that answers nothing has stopped, and is not. A collective that a peer's
// goodbye does not count will never finish, so it fails the group at once. Thread-safe.
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

  // Tells the peers that this rank closes, and waits until nobody needs this rank any more, or
  // can't be heard.
  void Say();

 private:
  struct Peer {
    bool parted = false;         // it has said goodbye, and is to be told once
    uint64_t counts = 0;         // as many collectives are done here
    bool needs_nothing = false;  // of this rank
  };

  bool IsUnneeded() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool AwaitUnneeded(std::chrono::milliseconds patience);
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
  SteadyCondVar changed_;                         // what peers need
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

#endif  // THINWIRE_SCHEDULE_ENGINE_ENDING_H_
