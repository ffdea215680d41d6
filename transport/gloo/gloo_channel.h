// GlooChannel: control frames with one peer, both ways, and the news that its connection broke.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_CHANNEL_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_CHANNEL_H_

#include <string>

#include "absl/status/status.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_inbox.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/gloo/gloo_receiver.h"
#include "transport/gloo/gloo_sender.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// No thread waits for a peer: Gloo's loop says when bytes came or left, and does the rest as well.
// Only once the connections are closed, and the loop is done with what was posted, it may end.
class GlooChannel final : private ConnectionObserver, private GlooLoop::Task {
 public:
  GlooChannel(GlooShared& shared, int peer, GlooReceiver& receiver);

  absl::Status Send(const ControlFrame& frame) { return sender_.Send(frame); }
  void Drain(Deadline deadline) { sender_.Drain(deadline); }

 private:
  void OnProgress() override;
  void OnClosed(const std::string& why) override;
  void Run() override;
  void Lost();

  GlooShared& shared_;
  const int peer_;
  GlooInbox inbox_;
  GlooSender sender_;
  bool observing_ = false;  // the loop's
  std::string closed_;      // why; set before the loop is asked to look
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_CHANNEL_H_
