// How a group ends, in the same way on every rank:
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

// The failure of `tensor` on this rank, as every rank reports it. A message that does not begin
// with "rank " is about this rank (such as its device), so the rank is prepended.
absl::Status OfTensor(int rank, const std::string& tensor, const absl::Status& status);

// FailureProtocol fails a group, once, for one reason, on every rank.
//
// The first reason wins. It is sent to every rank directly, and every rank sends it on to all
// others; the reason that a peer sends counts as that peer's echo. A caller that gets an error may
// end its process at once, and what that process has not sent, or its peers have not read, is then
// lost. So callers get the failure last: when every peer has echoed it or can't answer.
//
// A process that was stopped (by SIGSTOP, a debugger or a frozen container) finds on waking that
// its peers have closed their connections, and would report them as lost. So if Beat was not called
// for a quarter of the timeout, and at least half a second, then until one timeout later the reason
// of a lost peer or a passed deadline names that pause. Thread-safe.
class FailureProtocol {
 public:
  enum class Tell { kEveryone, kNobody };

  // References must outlive this object; the transport is empty in a world of one. Uses two
  // options: the timeout (waiting for a silent peer adds a small part of it), and flight_path,
  // where the last events are written with the first failure.
  FailureProtocol(const Membership& members, const Options& options, Transport& transport,
                  Records& records);

  // Call every few milliseconds.
  void Beat(Deadline now);
  // Returns the reason as Fail would record it at `now`: if this process was stopped, the message
  // says so, and Unavailable (lost peers) becomes DeadlineExceeded.
  absl::Status WithStandstill(const absl::Status& reason, Deadline now) const;

  // Records the reason, if it is the first, and sends it to all peers or to none. silent: the
  // number of peers known not to answer, whose echoes are not waited for.
  void Fail(absl::Status reason, Tell tell, int silent = 0);
  // An exchange of `tensor` failed. A rank that fails sends its reason and then closes its
  // connections, and peers may notice the closed connection first; so after a lost connection this
  // waits a moment for a better reason.
  void FailFromExchange(const absl::Status& status, const std::string& tensor);

  void OnPeerFailed(absl::Status reason, int silent);         // a peer sent its reason
  void OnControlLost(const absl::Status& reason, Tell tell);  // no more frames arrive
  void SendToAll(const ControlFrame& frame);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;  // the first reason, or OK
  absl::Status Explain(const std::string& tensor, const absl::Status& status) const;

  // Waits for a failure. True if the group has failed; false if it has not after `patience`.
  bool AwaitFailure(std::chrono::milliseconds patience) const;
  // After a failure: waits for the echoes, aborts the transport, and lets callers get the failure.
  void CarryThrough();
  // Call before a failure is returned to a caller: waits until CarryThrough allows it.
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
  const std::chrono::milliseconds last_words_;  // for this rank's reason to be sent
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mu_;
  mutable SteadyCondVar changed_;  // the status or the echoes
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  int echoes_ ABSL_GUARDED_BY(mu_) = 0;     // peers that have failed as well, or can't answer
  int silent_ ABSL_GUARDED_BY(mu_) = 0;     // peers known not to answer
  bool told_ ABSL_GUARDED_BY(mu_) = false;  // status_ may be returned to callers
  std::optional<Deadline> last_beat_ ABSL_GUARDED_BY(mu_);
  std::optional<Deadline> woke_ ABSL_GUARDED_BY(mu_);  // end of the last pause
  std::chrono::duration<double> stood_ ABSL_GUARDED_BY(mu_){0};
};

// Farewell ends a group in order. A rank that closes sends its peers a goodbye with the number of
// collectives that it has started, and waits until its peers have finished these as well: a rank
// may have all its results while its peers still exchange their last chunk, and a closed connection
// would look like a lost peer to them. A closing rank pings the peers that it waits for, and stops
// waiting when none of them answers any more. A collective beyond the number in a peer's goodbye
// will never finish, so it fails the group at once. Thread-safe.
class Farewell {
 public:
  // References must outlive this object; `control` is null in a world of one. timeout: the group's,
  // within which every started collective ends.
  Farewell(const Membership& members, std::chrono::milliseconds timeout, ControlPlane* control,
           FailureProtocol& failure);

  // This rank has started its collective number `started`, from 1.
  void OnStarted(uint64_t started);
  // A collective is done.
  void OnFinished();
  // A peer closes, after it has started `started` collectives.
  void OnBye(int from, uint64_t started);
  // A peer has finished all collectives that this rank's goodbye counts.
  void OnByeHeard(int from);
  // A peer has answered a ping, so it may still be at work.
  void OnPong(int from);
  // The control plane has failed: no more frames arrive. After this rank's goodbye that is no
  // failure, since a peer that has all goodbyes leaves, maybe before this rank has them.
  void OnControlLost(const absl::Status& reason);

  // Tells the peers that this rank closes, and waits until no peer needs this rank any more. Stops
  // waiting when the peers that still need it are all silent, the group fails, or the timeout
  // passes.
  void Say();

 private:
  struct Peer {
    bool parted = false;         // it has said goodbye, and still awaits our kByeHeard
    uint64_t counts = 0;         // collectives that must be done here before kByeHeard is sent
    bool needs_nothing = false;  // from this rank
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
  SteadyCondVar changed_;                         // Peer::needs_nothing of a peer
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mu_);  // by rank
  RollCall roll_ ABSL_GUARDED_BY(mu_);            // of peers that may still need this rank
  uint64_t finished_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t started_ ABSL_GUARDED_BY(mu_) = 0;
  bool said_ ABSL_GUARDED_BY(mu_) = false;
  int byes_ ABSL_GUARDED_BY(mu_) = 0;          // peers that have said goodbye
  int first_ ABSL_GUARDED_BY(mu_) = 0;         // of these peers, the one that started the fewest
  uint64_t counted_ ABSL_GUARDED_BY(mu_) = 0;  // collectives that peer started
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_ENDING_H_
