// UcxWorker: one rank's UCX context, worker and endpoints over shared memory, as an object of C++.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_WORKER_H_
#define THINWIRE_TRANSPORT_UCX_UCX_WORKER_H_

#include <ucp/api/ucp.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/planes.h"
#include "transport/store.h"
#include "transport/ucx/ucx_library.h"

namespace thinwire {

// Messages are eager, never by rendezvous. So UCX touches a caller's block only inside the calls of
// this class, and peers read and write none of this process's blocks: once nobody calls Progress,
// UCX uses no block.
//
// Thread-safe after the last Connect, with UCX's own lock, under which callbacks run.
class UcxWorker {
 public:
  // Unimplemented if this machine has no shared memory that UCX can use.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Make(std::shared_ptr<const UcxLibrary> ucx,
                                                         int size);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const UcxLibrary& ucx() const { return *ucx_; }

  // The address with which peers connect.
  absl::StatusOr<std::string> Address() const;

  // Call before the first message. `address` is the peer's.
  absl::Status Connect(int peer, const std::string& address);

  // Each calls `done(arg)` later and returns a request, which must be released; or returns null at
  // once.
  ucs_status_ptr_t Send(int peer, uint64_t tag, Bytes block, ucp_send_nbx_callback_t done,
                        void* arg);
  ucs_status_ptr_t Receive(uint64_t tag, MutableBytes block, ucp_tag_recv_nbx_callback_t done,
                           void* arg);

  bool HasEnded(void* request) const {
    return ucx_->request_check_status(request) != UCS_INPROGRESS;
  }
  // Afterwards UCX makes no callback for the request. Cancelling a receive makes UCX forget its
  // block; UCX can't cancel a send, but has copied what it needs.
  void Release(void* request, bool cancel);

  // Handles what has arrived and what could not leave; true if there was anything.
  bool Progress() { return ucx_->worker_progress(worker_) > 0; }

  // Blocks until something arrives, Wake is called, or the time has passed. Returns false at once
  // if there is work that causes no event: blocks wait for room at a peer.
  bool Sleep(Deadline until);
  void Wake() { ucx_->worker_signal(worker_); }

 private:
  UcxWorker(std::shared_ptr<const UcxLibrary> ucx, int size)
      : ucx_(std::move(ucx)), endpoints_(size) {}
  absl::Status OpenContext();
  absl::Status OpenWorker();

  const std::shared_ptr<const UcxLibrary> ucx_;
  std::vector<ucp_ep_h> endpoints_;  // by rank; null for this rank
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int events_ = -1;  // the worker's event descriptor
};

// UcxDriver: decides which thread calls UCX's Progress, and when waits end. It has no thread of its
// own: the waiting threads drive. One of them at a time leads, that is, calls Progress for all of
// them: first without a pause, because most messages arrive within microseconds, then asleep on
// UCX's descriptor. A leader whose own wait has ended passes the lead on.
//
// A failure ends all waits, and no thread drives afterwards, so UCX touches no block any more.
class UcxDriver {
 public:
  // True once a transfer has ended; set by callbacks of UCX, inside Progress.
  using Flag = std::atomic<bool>;

  explicit UcxDriver(UcxWorker& worker);

  // Returns OK when `done` is set, else the first failure; then no thread is inside Progress. After
  // the deadline it returns DeadlineExceeded, without failing.
  absl::Status Await(const Flag& done, Deadline deadline);

  // For callbacks of UCX: sets `done` and ends the wait for it.
  void Complete(Flag& done);

  // Makes a leader that sleeps check at once for blocks that wait for room at a peer.
  void Nudge();

  // Its failure ends all waits.
  const std::shared_ptr<Failure>& failure() const { return failure_; }

 private:
  enum class Turn { kOver, kLead };

  Turn NextTurn(const Flag& done, Deadline deadline);
  void Lead(const Flag& done, Deadline deadline);
  absl::Status Leave(const Flag& done);
  void StepDown();
  void OnFailure();

  UcxWorker& worker_;
  const std::shared_ptr<Failure> failure_ = Failure::Make();
  std::atomic<bool> asleep_{false};  // the leader
  absl::Mutex mu_;
  bool led_ ABSL_GUARDED_BY(mu_) = false;
  Failure::Listener listener_;  // destroyed first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_WORKER_H_
