// GlooInbox: control frames from one peer.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_INBOX_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_INBOX_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/control_plane.h"
#include "transport/gloo/gloo_receiver.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// A ring of frames. Gloo sends a message only when its receive is known at the other end, so the
// receives of a whole ring are started ahead, and a frame takes one latency, not two. Frames of a
// connection arrive in the order in which their receives were started.
//
// Once it is made, all of it is the loop's thread's. It ends when the loop is done with it.
class GlooInbox final : private GlooLoop::Task {
 public:
  GlooInbox(GlooShared& shared, int peer, GlooReceiver& receiver);

  // Hands on the frames that have come.
  void Collect();
  // Lets others come in their places. Not once the connection is closed: nobody waits for what that
  // would post.
  void Refill();

 private:
  static constexpr size_t kFrames = 16;

  void Run() override;

  GlooShared& shared_;
  const int peer_;
  GlooReceiver& receiver_;
  std::vector<ControlFrame> ring_;
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  bool posted_ = true;                                       // Run will start more receives
  size_t started_ = 0, taken_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_INBOX_H_
