// The control channel over Gloo: frames of one size on one slot, both ways with each peer.
#ifndef THINWIRE_TRANSPORT_GLOO_CONTROL_H_
#define THINWIRE_TRANSPORT_GLOO_CONTROL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/gloo_shared.h"
#include "transport/transport.h"

namespace thinwire {

inline constexpr uint64_t kGlooControlSlot = 2;  // even slots are the control channel's

// Frames to one peer. Never waits for it: a peer that takes nothing, because it is stopped, must
// not stop those who would say so. Sending copies into a ring, or, when all of that is under way,
// into a queue. Gloo says only to a thread that waits which frames have left, hence the thread.
class GlooControlSender {
 public:
  GlooControlSender(GlooShared& shared, int peer);
  ~GlooControlSender() { Stop(); }

  absl::Status Send(const ControlFrame& frame);

  // Gives what was sent a moment to leave. Only after a failure, which ends the thread's wait.
  void Drain(Deadline deadline);

 private:
  static constexpr size_t kFrames = 64;

  void PostLocked();
  bool CrowdedLocked() const { return under_way_ > kFrames / 2; }
  void Reap();
  void Stop();

  GlooShared& shared_;
  const int peer_;
  std::mutex mu_;
  std::condition_variable crowded_;  // under_way_ or stopped_
  bool stopped_ = false;
  std::deque<ControlFrame> queue_;
  std::vector<ControlFrame> ring_;
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  size_t next_ = 0, under_way_ = 0;
  std::thread reaper_;
};

// Frames from everybody: a thread for each peer, because only a wait that is tied to one
// connection learns that this connection broke.
class GlooControlReceiver {
 public:
  explicit GlooControlReceiver(GlooShared& shared);
  ~GlooControlReceiver();

  // Blocks until a frame comes, or, when the transport has failed, all that came were taken.
  absl::StatusOr<ControlMessage> Receive();

 private:
  void Read(int peer);
  void ReadFrames(int peer, ControlMessage* message);
  bool Wait(GlooShared::UnboundBuffer* buffer);
  void OnClosed(int peer, const std::string& error);

  GlooShared& shared_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<ControlMessage> frames_;
  int readers_done_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_CONTROL_H_
