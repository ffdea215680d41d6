#include "transport/gloo/gloo_receiver.h"

namespace thinwire {

GlooReceiver::GlooReceiver(GlooShared& shared) : shared_(shared) {
  shared_.OnFailure([this] { Close(); });
}

void GlooReceiver::Push(int from, const ControlFrame& frame) {
  const absl::MutexLock lock(&mu_);
  frames_.push_back({from, frame});
}

absl::StatusOr<ControlMessage> GlooReceiver::Receive() {
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &GlooReceiver::IsReady));
    if (!frames_.empty()) {
      const ControlMessage message = frames_.front();
      frames_.pop_front();
      return message;
    }
  }
  return shared_.status();
}

void GlooReceiver::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
}

}  // namespace thinwire
