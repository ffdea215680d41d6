#include "transport/gloo/gloo_sender.h"

#include <chrono>
#include <exception>

#include "transport/gloo/gloo_pair.h"
#include "transport/gloo/sigpipe.h"

namespace thinwire {
namespace {

constexpr std::chrono::microseconds kAcknowledged(200);  // between two looks

}  // namespace

GlooSender::GlooSender(GlooShared& shared, int peer)
    : shared_(shared),
      peer_(peer),
      ring_(kFrames),
      buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)),
      reaper_([this] { Reap(); }) {}

GlooSender::~GlooSender() {
  Stop();
  shared_.loop().Sync();
}

absl::Status GlooSender::Send(const ControlFrame& frame) {
  {
    const absl::MutexLock lock(&mu_);
    queue_.push_back(frame);
  }
  Post();
  return shared_.status();
}

void GlooSender::Post() {
  {
    const absl::MutexLock lock(&mu_);
    if (posted_) return;
    posted_ = true;
  }
  shared_.loop().Post(this);
}

void GlooSender::Run() {
  try {
    while (const std::optional<size_t> offset = TakeNext()) {
      buffer_->send(peer_, kGlooControlSlot, *offset, kControlBytes);
    }
  } catch (const std::exception& error) {
    const absl::MutexLock lock(&mu_);
    --under_way_;
    posted_ = false;
    broken_ = error.what();
    changed_.Signal();
  }
}

std::optional<size_t> GlooSender::TakeNext() {
  const absl::MutexLock lock(&mu_);
  if (queue_.empty() || under_way_ == kFrames) {
    posted_ = false;
    // The reaper is not woken for every frame: half a ring is soon enough.
    if (Crowded()) changed_.Signal();
    return std::nullopt;
  }
  const size_t place = next_++ % kFrames;
  ring_[place] = queue_.front();
  queue_.pop_front();
  ++under_way_;
  return place * kControlBytes;
}

// Frames leave in order, so it is the oldest that has left.
void GlooSender::Left() {
  bool more;
  {
    const absl::MutexLock lock(&mu_);
    --under_way_;
    more = !queue_.empty();
  }
  if (more) Post();
}

void GlooSender::Reap() {
  const SigpipeBlock no_signal;
  for (;;) {
    std::string broken;
    {
      const absl::MutexLock lock(&mu_);
      while (!stopped_ && broken_.empty() && !Crowded()) changed_.Wait(&mu_);
      if (stopped_) return;
      broken = broken_;
    }
    if (!broken.empty()) return shared_.FailBroken(broken);
    if (!shared_.Guarded(buffer_.get(), [this] { return buffer_->waitSend(kForever); })) return;
    Left();
  }
}

void GlooSender::Stop() {
  {
    const absl::MutexLock lock(&mu_);
    stopped_ = true;
    changed_.Signal();
  }
  if (reaper_.joinable()) reaper_.join();
}

void GlooSender::Drain(Deadline deadline) {
  const SigpipeBlock no_signal;
  Stop();
  Post();
  shared_.loop().Sync();
  try {
    for (;;) {
      {
        const absl::MutexLock lock(&mu_);
        if (under_way_ == 0) break;
      }
      // A wait that an earlier failure ended returns at once, and once only.
      if (!buffer_->waitSend(Until(deadline))) buffer_->waitSend(Until(deadline));
      Left();
      shared_.loop().Sync();
    }
  } catch (const std::exception&) {
    return;  // the peer is gone or does not listen
  }
  while (IsOnItsWay(shared_.context(), peer_) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kAcknowledged);
  }
}

}  // namespace thinwire
