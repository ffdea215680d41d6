// The control plane over Gloo: frames of one size on one slot, both ways with each peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

inline constexpr uint64_t kGlooControlSlot = 2;  // even slots are the control plane's

// Frames to one peer. It never waits for that peer: one that takes nothing, because it is stopped,
// must not stop those who would say so. Sending copies into a ring, or, when all of that is under
// way, leaves the frame in a queue. Gloo says only to a thread that waits which frames have left,
// so this class has one.
//
// Frames leave in order without a lock over Gloo's send: one thread at a time posts. Whoever finds
// another one posting leaves its frame in the queue, which that thread empties before it stops.
class GlooControlSender {
 public:
  GlooControlSender(GlooShared& shared, int peer);
  ~GlooControlSender() { Stop(); }

  absl::Status Send(const ControlFrame& frame);

  // Gives what was sent a moment to leave. Only after a failure, which ends the thread's wait.
  void Drain(Deadline deadline);

 private:
  static constexpr size_t kFrames = 64;

  void Post();
  // The offset in the ring of the next frame to post, which is under way from here on. Nothing when
  // the queue is empty or the ring full, which ends this thread's posting.
  std::optional<size_t> TakeNext();
  void Left();
  void Reap();
  void Stop();
  bool Crowded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return under_way_ > kFrames / 2; }

  GlooShared& shared_;
  const int peer_;
  std::vector<ControlFrame> ring_;  // a place belongs to the posting thread, then to Gloo
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  absl::Mutex mu_;
  absl::CondVar changed_;  // crowded, or stopped
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool posting_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<ControlFrame> queue_ ABSL_GUARDED_BY(mu_);
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;  // frames taken into the ring so far
  size_t under_way_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread reaper_;
};

// Frames from everybody: a thread for each peer, because only a wait that is tied to one
// connection learns that this connection broke.
class GlooControlReceiver {
 public:
  explicit GlooControlReceiver(GlooShared& shared);
  ~GlooControlReceiver();  // after a failure, which ends the threads' waits

  // Blocks until a frame comes, or, when the plane has failed, all that came were taken.
  absl::StatusOr<ControlMessage> Receive();

 private:
  void Read(int peer);
  void ReadFrames(int peer, ControlMessage* message);
  bool Wait(GlooShared::UnboundBuffer* buffer);
  void OnClosed(int peer, const std::string& error);

  GlooShared& shared_;
  absl::Mutex mu_;
  absl::CondVar changed_;
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);
  int readers_done_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> threads_;
};

// Its destruction closes the connections, of the data plane as well.
class GlooControl final : public ControlPlane {
 public:
  explicit GlooControl(std::shared_ptr<GlooShared> shared);
  ~GlooControl() override;

  const Membership& members() const override { return shared_->members(); }
  absl::Status Send(int to, const ControlFrame& frame) override {
    return senders_[to]->Send(frame);
  }
  absl::StatusOr<ControlMessage> Receive() override { return receiver_->Receive(); }
  void Abort(absl::Status reason) override { shared_->Fail(reason); }
  void Flush(Deadline deadline) override;
  absl::Status status() const override { return shared_->status(); }

 private:
  const std::shared_ptr<GlooShared> shared_;
  std::vector<std::unique_ptr<GlooControlSender>> senders_;  // null at the own rank
  std::unique_ptr<GlooControlReceiver> receiver_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CONTROL_H_
