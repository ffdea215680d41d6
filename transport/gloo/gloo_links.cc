#include "transport/gloo/gloo_links.h"

#include <algorithm>
#include <utility>

#include "transport/gloo/gloo_pair.h"

namespace thinwire {

GlooLinks::GlooLinks(std::shared_ptr<gloo::Context> context, std::unique_ptr<GlooLoop> loop,
                     std::shared_ptr<Failure> failure)
    : context_(std::move(context)),
      members_{context_->rank, context_->size},
      failure_(std::move(failure)),
      loop_(std::move(loop)) {
  for (int peer = 0; peer < members_.size; ++peer) {
    peers_.push_back(IsConnected(*context_, peer) ? std::make_unique<GlooPeer>(*this, peer)
                                                  : nullptr);
  }
  listener_ = failure_->Listen([this] { OnFailure(); });
}

GlooLinks::~GlooLinks() { Close(); }

void GlooLinks::PushFrame(int from, const Bytes& frame) {
  ControlMessage message;
  message.from = from;
  std::copy(frame.begin(), frame.end(), message.frame.begin());
  const absl::MutexLock lock(&mu_);
  frames_.push_back(message);
}

absl::StatusOr<ControlMessage> GlooLinks::ReceiveFrame() {
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &GlooLinks::IsReady));
    if (!frames_.empty()) {
      const ControlMessage message = frames_.front();
      frames_.pop_front();
      return message;
    }
  }
  return failure_->reason();
}

// Whoever failed first may not have told this yet.
void GlooLinks::AwaitEnd() {
  loop_->Post(this);
  loop_->Sync();
}

void GlooLinks::Drain(Deadline deadline) {
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->Drain(deadline);
  }
}

void GlooLinks::Close() {
  if (!std::exchange(closed_, true)) CloseConnections(*context_, *loop_);
}

bool GlooLinks::Join(BlockOwner* owner) {
  if (!failed_) owners_.insert(owner);
  return !failed_;
}

void GlooLinks::OnFailure() {
  if (failure_->failed()) {
    const absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  loop_->Post(this);
}

void GlooLinks::Run() {
  if (!failure_->failed()) {
    for (int rank = 0; rank < members_.size; ++rank) {
      if (peers_[rank] == nullptr) continue;
      const absl::Status reason = failure_->peer_reason(rank);
      if (!reason.ok()) peers_[rank]->Lose(reason);
    }
    return;
  }
  if (std::exchange(failed_, true)) return;
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->ForgetBlocks();
  }
  for (BlockOwner* const owner : std::exchange(owners_, {})) owner->OnFailure();
}

}  // namespace thinwire
