#include "transport/gloo/gloo_control.h"

#include <chrono>
#include <utility>

#include "transport/gloo/gloo_pair.h"

namespace thinwire {

GlooControl::GlooControl(std::shared_ptr<GlooShared> shared)
    : shared_(std::move(shared)), receiver_(*shared_) {
  for (int peer = 0; peer < size(); ++peer) {
    channels_.push_back(peer == rank() ? nullptr
                                       : std::make_unique<GlooChannel>(*shared_, peer, receiver_));
  }
}

GlooControl::~GlooControl() {
  shared_->Fail(absl::CancelledError("the transport was destroyed"));
  Flush(Clock::now() + std::chrono::milliseconds(200));
  CloseConnections(shared_->context(), shared_->loop());
}

void GlooControl::Flush(Deadline deadline) {
  if (shared_->status().ok()) return;
  for (const auto& channel : channels_) {
    if (channel != nullptr) channel->Drain(deadline);
  }
}

}  // namespace thinwire
