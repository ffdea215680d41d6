// UcxDriver: who calls UCX's Progress, and when waits end.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_DRIVER_H_
#define THINWIRE_TRANSPORT_UCX_UCX_DRIVER_H_

#include <atomic>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/failure.h"
#include "transport/store.h"
#include "transport/ucx/ucx_worker.h"

namespace thinwire {

// No thread of its own: those who wait drive. One of them at a time leads, which is calling
// Progress for all of them: first without a pause, because most messages come within microseconds,
// then asleep on UCX's descriptor. A leader whose own wait has ended leaves the lead to another.
//
// A failure ends all waits, and nobody drives afterwards, so UCX touches no block any more.
class UcxDriver {
 public:
  // True once something has ended; set by callbacks of UCX, under Progress.
  using Flag = std::atomic<bool>;

  UcxDriver(UcxWorker& worker, std::shared_ptr<Failure> failure);

  // Returns OK when `done` is set, else the first failure; then nobody is inside Progress. Past the
  // deadline it returns DeadlineExceeded, without failing.
  absl::Status Await(const Flag& done, Deadline deadline);

  // For callbacks of UCX: sets `done` and ends the wait for it.
  void Complete(Flag& done);

  // A leader that sleeps looks at once for blocks that wait for room at a peer.
  void Nudge();

  // Ends all waits.
  const std::shared_ptr<Failure>& failure() const { return failure_; }

 private:
  enum class Turn { kOver, kLead };

  Turn NextTurn(const Flag& done, Deadline deadline);
  void Lead(const Flag& done, Deadline deadline);
  absl::Status Leave(const Flag& done);
  void StepDown();
  void OnFailure();

  UcxWorker& worker_;
  const std::shared_ptr<Failure> failure_;
  std::atomic<bool> asleep_{false};  // the leader
  absl::Mutex mu_;
  bool led_ ABSL_GUARDED_BY(mu_) = false;
  Failure::Listener listener_;  // ends first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_DRIVER_H_
