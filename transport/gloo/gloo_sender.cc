#include "transport/gloo/gloo_sender.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "transport/gloo/gloo_completions.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/time_left.h"

namespace thinwire {
namespace {

constexpr std::chrono::microseconds kAcknowledged(200);  // between two looks

}  // namespace

GlooSender::GlooSender(GlooShared& shared, int peer)
    : shared_(shared),
      peer_(peer),
      ring_(kFrames),
      buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)) {}

absl::Status GlooSender::Send(const ControlFrame& frame) {
  bool post = false;
  {
    const absl::MutexLock lock(&mu_);
    if (!closed_) {
      queue_.push_back(frame);
      post = !std::exchange(posted_, true);
    }
  }
  if (post) shared_.loop().Post(this);
  return shared_.status();
}

void GlooSender::Run() {
  try {
    while (const std::optional<size_t> offset = TakeNext()) {
      buffer_->send(peer_, kGlooControlSlot, *offset, kControlBytes);
    }
  } catch (const std::exception&) {
    Close();
  }
}

std::optional<size_t> GlooSender::TakeNext() {
  // A send that finds its receive and room in the socket has left by now.
  const size_t left = TakeSent(*buffer_);
  const absl::MutexLock lock(&mu_);
  under_way_ -= left;
  if (queue_.empty() || under_way_ == kFrames || closed_) {
    posted_ = false;
    return std::nullopt;
  }
  const size_t place = next_++ % kFrames;
  ring_[place] = queue_.front();
  queue_.pop_front();
  ++under_way_;
  return place * kControlBytes;
}

// Frames leave in order, so it is the oldest that have left.
void GlooSender::Collect() {
  const size_t left = TakeSent(*buffer_);
  if (left == 0) return;
  {
    const absl::MutexLock lock(&mu_);
    under_way_ -= left;
    if (queue_.empty() || std::exchange(posted_, true)) return;
  }
  shared_.loop().Post(this);
}

void GlooSender::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
}

void GlooSender::Drain(Deadline deadline) {
  {
    const absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &GlooSender::HasLeft), TimeLeft(deadline));
  }
  while (IsOnItsWay(shared_.context(), peer_) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kAcknowledged);
  }
}

}  // namespace thinwire
