// FailureProtocol: how a group fails, once, for one reason, on every rank.
//
// The first reason wins. It goes to every rank directly, and every rank passes it on, so a peer's
// own word is the echo. A caller that gets an error may end its process at once, and a process that
// ends takes along what it has not sent, and what its peers have not read; so callers hear of a
// failure last: when every peer has heard of it, or can't be heard any more.
#ifndef THINWIRE_SCHEDULE_ENGINE_FAILURE_H_
#define THINWIRE_SCHEDULE_ENGINE_FAILURE_H_

#include <atomic>
#include <chrono>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "schedule/engine/records.h"
#include "schedule/engine/standstill.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "transport/transport.h"

namespace thinwire {

// The failure of that tensor's exchange, as every rank is told.
absl::Status OfTensor(const std::string& tensor, const absl::Status& status);

// Thread-safe.
class FailureProtocol {
 public:
  enum class Tell { kEveryone, kNobody };

  // References outlive it; the transport is empty in a world of one. Of the options: the timeout,
  // of which a silent peer may cost a small part, and flight_path, where the last events go
  // with the first failure.
  FailureProtocol(const Membership& members, const Options& options, Transport& transport,
                  const Standstill& standstill, Records& records);

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
  bool AwaitFailure(absl::Duration patience) const;
  // After a failure: waits for the echoes, aborts the transport, and lets callers hear of it.
  void CarryThrough();
  // Before a failure is handed to a caller.
  void AwaitTold() const;

 private:
  int peers() const { return members_.size - 1; }
  void OnEchoes(int echoes);
  void WriteFlight() const;

  bool HasFailed() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !status_.ok(); }
  bool IsEchoed() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return echoes_ + silent_ >= peers(); }
  bool MayTell() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return status_.ok() || told_; }

  const Membership members_;
  Transport& transport_;
  const Standstill& standstill_;
  Records& records_;
  const std::string flight_path_;
  const absl::Duration echo_patience_;
  const std::chrono::milliseconds last_words_;  // for the own reason to leave
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  int echoes_ ABSL_GUARDED_BY(mu_) = 0;     // peers that have failed as well, or can't say so
  int silent_ ABSL_GUARDED_BY(mu_) = 0;     // peers that will not say so
  bool told_ ABSL_GUARDED_BY(mu_) = false;  // status_ may be handed out
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_FAILURE_H_
