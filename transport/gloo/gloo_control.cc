#include "transport/gloo/gloo_control.h"

#include <chrono>
#include <utility>

#include "transport/gloo/sigpipe.h"

namespace thinwire {

GlooControl::GlooControl(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {
  for (int peer = 0; peer < size(); ++peer) {
    senders_.push_back(peer == rank() ? nullptr : std::make_unique<GlooSender>(*shared_, peer));
  }
  receiver_ = std::make_unique<GlooReceiver>(*shared_);
}

GlooControl::~GlooControl() {
  const SigpipeBlock no_signal;
  shared_->Fail(absl::CancelledError("the transport was destroyed"));
  receiver_.reset();
  Flush(Clock::now() + std::chrono::milliseconds(200));
  shared_->context().closeConnections();
}

void GlooControl::Flush(Deadline deadline) {
  if (shared_->status().ok()) return;
  for (const auto& sender : senders_) {
    if (sender != nullptr) sender->Drain(deadline);
  }
}

}  // namespace thinwire
