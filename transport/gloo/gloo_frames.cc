#include "transport/gloo/gloo_frames.h"

#include <utility>

#include "transport/gloo/gloo_pair.h"

namespace thinwire {

GlooFrames::GlooFrames(gloo::Context& context, int peer, uint64_t slot, size_t bytes, size_t count)
    : peer_(peer),
      slot_(slot),
      bytes_(bytes),
      count_(count),
      in_(bytes * count),
      out_(bytes * count),
      receiver_(context.createUnboundBuffer(in_.data(), in_.size())),
      sender_(context.createUnboundBuffer(out_.data(), out_.size())) {}

void GlooFrames::Refill() {
  while (started_ - taken_ < count_) {
    const size_t offset = started_++ % count_ * bytes_;
    receiver_->recv(peer_, slot_, offset, bytes_);
  }
}

MutableBytes GlooFrames::next() { return Frame(out_, sent_); }

void GlooFrames::Send(std::vector<BlockOwner*> owners) {
  owners_.push_back(std::move(owners));
  const size_t offset = sent_++ % count_ * bytes_;
  sender_->send(peer_, slot_, offset, bytes_);
}

bool GlooFrames::Collect(const std::function<void(Bytes)>& take) {
  for (size_t came = TakeReceived(*receiver_); came > 0; --came) take(Frame(in_, taken_++));
  const size_t left = TakeSent(*sender_);
  for (size_t i = 0; i < left && !owners_.empty(); ++i) {
    const std::vector<BlockOwner*> owners = std::move(owners_.front());
    owners_.pop_front();
    for (BlockOwner* const owner : owners) owner->OnBlockEnded(absl::OkStatus());
  }
  return left > 0;
}

std::vector<BlockOwner*> GlooFrames::ForgetOwners() {
  std::vector<BlockOwner*> all;
  for (std::vector<BlockOwner*>& owners : owners_) {
    all.insert(all.end(), owners.begin(), owners.end());
    owners.clear();
  }
  return all;
}

}  // namespace thinwire
