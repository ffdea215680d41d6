// GlooLinks: one rank's connections with all others by Gloo, the thread that may use them, and what
// is under way. Both planes of the rank stand on it.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_

#include <gloo/context.h>

#include <deque>
#include <memory>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/failure.h"
#include "transport/gloo/gloo_loop.h"
#include "transport/gloo/gloo_peer.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

class GlooLinks final : private GlooLoop::Task {
 public:
  // `loop` is that of the context's device. From here on the failure ends exchanges and receives,
  // and lost peers fail by it.
  GlooLinks(std::shared_ptr<gloo::Context> context, std::unique_ptr<GlooLoop> loop,
            std::shared_ptr<Failure> failure);
  ~GlooLinks();

  gloo::Context& context() { return *context_; }
  GlooLoop& loop() { return *loop_; }
  Failure& failure() const { return *failure_; }
  const std::shared_ptr<Failure>& shared_failure() const { return failure_; }
  const Membership& members() const { return members_; }
  GlooPeer* peer(int rank) { return peers_[rank].get(); }  // null: there is no connection

  // Thread-safe.
  void PushFrame(int from, const Bytes& frame);
  // Blocks until a frame comes, or, when the group has failed, all that came were taken.
  absl::StatusOr<ControlMessage> ReceiveFrame();

  // After a failure: returns when no block of an exchange is touched any more.
  void AwaitEnd();
  // Gives frames until the deadline to leave.
  void Drain(Deadline deadline);
  // Closes all connections, unless they are closed; nothing happens here afterwards.
  void Close();

  // On the loop's thread: an owner of blocks under way has joined before, and leaves when they have
  // ended. False once the group has failed.
  bool Join(BlockOwner* owner);
  void Leave(BlockOwner* owner) { owners_.erase(owner); }

 private:
  void OnFailure();
  void Run() override;  // after a failure
  bool IsReady() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return ended_ || !frames_.empty(); }

  const std::shared_ptr<gloo::Context> context_;
  const Membership members_;
  const std::shared_ptr<Failure> failure_;
  std::vector<std::unique_ptr<GlooPeer>> peers_;  // by rank
  std::unordered_set<BlockOwner*> owners_;        // the loop's thread's, as the next one
  bool failed_ = false;
  bool closed_ = false;

  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // the group has failed
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);

  const std::unique_ptr<GlooLoop> loop_;  // ends before all above: what was posted runs by then
  Failure::Listener listener_;            // ends first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_LINKS_H_
