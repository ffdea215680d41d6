#include "transport/gloo/gloo_inbox.h"

#include <exception>

#include "transport/gloo/gloo_completions.h"

namespace thinwire {

GlooInbox::GlooInbox(GlooShared& shared, int peer, GlooReceiver& receiver)
    : shared_(shared),
      peer_(peer),
      receiver_(receiver),
      ring_(kFrames),
      buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)) {
  shared_.loop().Post(this);
}

void GlooInbox::Collect() {
  for (size_t frames = TakeReceived(*buffer_); frames > 0; --frames) {
    receiver_.Push(peer_, ring_[taken_++ % kFrames]);
  }
}

void GlooInbox::Refill() {
  if (posted_ || started_ - taken_ > kFrames / 2) return;  // half a ring at a time
  posted_ = true;
  shared_.loop().Post(this);
}

void GlooInbox::Run() {
  posted_ = false;
  try {
    for (; started_ - taken_ < kFrames; ++started_) {
      const size_t place = started_ % kFrames;
      buffer_->recv(peer_, kGlooControlSlot, place * kControlBytes, kControlBytes);
    }
  } catch (const std::exception&) {
    return;  // the connection is closed, which its observer is told
  }
}

}  // namespace thinwire
