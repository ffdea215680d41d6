// GlooReceiver: control frames from everybody, and the news that a connection broke.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// A thread reads for each peer, because only a wait that is tied to one connection learns that this
// connection broke.
class GlooReceiver {
 public:
  explicit GlooReceiver(GlooShared& shared);
  ~GlooReceiver();  // after a failure, which ends the threads' waits

  // Blocks until a frame comes, or, when the plane has failed, all that came were taken.
  absl::StatusOr<ControlMessage> Receive();

 private:
  class Inbox;

  void Read(int peer);
  void OnClosed(int peer, const std::string& error);

  GlooShared& shared_;
  absl::Mutex mu_;
  absl::CondVar changed_;
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);
  int readers_done_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> threads_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_
