// GlooSender: control frames to one peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// It never waits for its peer: one that takes nothing, because it is stopped, must not stop those
// who would say so. A frame waits in a queue until Gloo's loop copies it into a ring and sends it
// from there. It ends when the loop is done with it.
class GlooSender final : private GlooLoop::Task {
 public:
  GlooSender(GlooShared& shared, int peer);

  // Also after a failure: the peers should hear its reason before the connections close.
  absl::Status Send(const ControlFrame& frame);

  // Gives what was sent a moment to leave.
  void Drain(Deadline deadline);

  // On the loop's thread:
  void Collect();  // frames that have left make room for others
  void Close();    // nothing leaves any more

 private:
  static constexpr size_t kFrames = 16;  // as many as a peer expects at once

  void Run() override;
  // The offset in the ring of the next frame to send, which is under way from here on. Nothing when
  // the queue is empty, the ring full or the connection closed, which ends this run.
  std::optional<size_t> TakeNext();
  bool HasLeft() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return closed_ || (queue_.empty() && under_way_ == 0);
  }

  GlooShared& shared_;
  const int peer_;
  std::vector<ControlFrame> ring_;                           // a place belongs to the loop's thread
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  absl::Mutex mu_;
  bool posted_ ABSL_GUARDED_BY(mu_) = false;  // Run will look into the queue again
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<ControlFrame> queue_ ABSL_GUARDED_BY(mu_);
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;  // frames taken into the ring so far
  size_t under_way_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_
