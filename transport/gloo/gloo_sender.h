// GlooSender: control frames to one peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// It never waits for its peer: one that takes nothing, because it is stopped, must not stop those
// who would say so. A frame waits in a queue until Gloo's loop copies it into a ring and sends it
// from there. Gloo says only to a thread that waits which frames have left, so this class has one.
class GlooSender final : private GlooLoop::Task {
 public:
  GlooSender(GlooShared& shared, int peer);
  ~GlooSender();

  // Also after a failure: the peers should hear its reason before the connections close.
  absl::Status Send(const ControlFrame& frame);

  // Gives what was sent a moment to leave. Only after a failure, which ends the thread's wait.
  void Drain(Deadline deadline);

 private:
  static constexpr size_t kFrames = 64;

  void Post();
  void Run() override;
  // The offset in the ring of the next frame to send, which is under way from here on. Nothing when
  // the queue is empty or the ring full, which ends this run.
  std::optional<size_t> TakeNext();
  void Left();
  void Reap();
  void Stop();
  bool Crowded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return under_way_ > kFrames / 2; }

  GlooShared& shared_;
  const int peer_;
  std::vector<ControlFrame> ring_;                           // a place belongs to the loop's thread
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  absl::Mutex mu_;
  absl::CondVar changed_;  // crowded, broken or stopped
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool posted_ ABSL_GUARDED_BY(mu_) = false;  // Run will look into the queue again
  std::string broken_ ABSL_GUARDED_BY(mu_);   // why the connection took no frame
  std::deque<ControlFrame> queue_ ABSL_GUARDED_BY(mu_);
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;  // frames taken into the ring so far
  size_t under_way_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread reaper_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_SENDER_H_
