// GlooReceiver: control frames that have come, from everybody.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_

#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {

// Thread-safe.
class GlooReceiver {
 public:
  // From here to its end it hears of the failure of both planes.
  explicit GlooReceiver(GlooShared& shared);
  ~GlooReceiver() { shared_.OnFailure(nullptr); }

  void Push(int from, const ControlFrame& frame);

  // Blocks until a frame comes, or, when the plane has failed, all that came were taken.
  absl::StatusOr<ControlMessage> Receive();

 private:
  void Close();
  bool IsReady() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !frames_.empty(); }

  GlooShared& shared_;
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<ControlMessage> frames_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_RECEIVER_H_
