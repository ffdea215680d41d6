#include "transport/gloo/gloo_control.h"

#include <utility>

#include "transport/gloo/gloo_pair.h"

namespace thinwire {

GlooControl::GlooControl(std::shared_ptr<GlooShared> shared, std::chrono::milliseconds last_words)
    : shared_(std::move(shared)), last_words_(last_words), receiver_(*shared_) {
  for (int peer = 0; peer < size(); ++peer) {
    channels_.push_back(IsConnected(shared_->context(), peer)
                            ? std::make_unique<GlooChannel>(*shared_, peer, receiver_)
                            : nullptr);
  }
}

GlooControl::~GlooControl() {
  shared_->Fail(absl::CancelledError("the transport was destroyed"));
  Flush(Clock::now() + last_words_);
  CloseConnections(shared_->context(), shared_->loop());
}

absl::Status GlooControl::Send(int to, const ControlFrame& frame) {
  return channels_[to] != nullptr ? channels_[to]->Send(frame) : shared_->status();
}

void GlooControl::Flush(Deadline deadline) {
  if (shared_->status().ok()) return;
  for (const auto& channel : channels_) {
    if (channel != nullptr) channel->Drain(deadline);
  }
}

}  // namespace thinwire
