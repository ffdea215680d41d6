#include "transport/gloo/gloo_control.h"

#include <chrono>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/sigpipe.h"

namespace thinwire {

GlooControlSender::GlooControlSender(GlooShared& shared, int peer)
    : shared_(shared),
      peer_(peer),
      ring_(kFrames),
      buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)),
      reaper_([this] { Reap(); }) {}

absl::Status GlooControlSender::Send(const ControlFrame& frame) {
  const SigpipeBlock no_signal;
  {
    const absl::MutexLock lock(&mu_);
    queue_.push_back(frame);
  }
  Post();
  return shared_.status();
}

// Posts even after a failure: the peers should hear its reason before the connections close.
void GlooControlSender::Post() {
  {
    const absl::MutexLock lock(&mu_);
    if (posting_) return;
    posting_ = true;
  }
  try {
    while (const std::optional<size_t> offset = TakeNext()) {
      buffer_->send(peer_, kGlooControlSlot, *offset, kControlBytes);
    }
  } catch (const std::exception& error) {
    {
      const absl::MutexLock lock(&mu_);
      --under_way_;
      posting_ = false;
    }
    shared_.FailBroken(error.what());
  }
}

std::optional<size_t> GlooControlSender::TakeNext() {
  const absl::MutexLock lock(&mu_);
  if (queue_.empty() || under_way_ == kFrames) {
    posting_ = false;
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
void GlooControlSender::Left() {
  {
    const absl::MutexLock lock(&mu_);
    --under_way_;
  }
  Post();
}

void GlooControlSender::Reap() {
  const SigpipeBlock no_signal;
  for (;;) {
    {
      const absl::MutexLock lock(&mu_);
      while (!stopped_ && !Crowded()) changed_.Wait(&mu_);
      if (stopped_) return;
    }
    if (!shared_.Guarded(buffer_.get(), [this] { return buffer_->waitSend(kForever); })) return;
    Left();
  }
}

void GlooControlSender::Stop() {
  {
    const absl::MutexLock lock(&mu_);
    stopped_ = true;
    changed_.Signal();
  }
  if (reaper_.joinable()) reaper_.join();
}

void GlooControlSender::Drain(Deadline deadline) {
  const SigpipeBlock no_signal;
  Stop();
  Post();
  try {
    for (;;) {
      {
        const absl::MutexLock lock(&mu_);
        if (under_way_ == 0) return;
      }
      // A wait that an earlier failure ended returns at once, and once only.
      if (!buffer_->waitSend(Until(deadline))) buffer_->waitSend(Until(deadline));
      Left();
    }
  } catch (const std::exception&) {
    return;  // the peer is gone or does not listen
  }
}

GlooControlReceiver::GlooControlReceiver(GlooShared& shared) : shared_(shared) {
  const Membership& members = shared.members();
  for (int peer = 0; peer < members.size; ++peer) {
    if (peer != members.rank) threads_.emplace_back([this, peer] { Read(peer); });
  }
}

GlooControlReceiver::~GlooControlReceiver() {
  for (std::thread& thread : threads_) thread.join();
}

absl::StatusOr<ControlMessage> GlooControlReceiver::Receive() {
  {
    const absl::MutexLock lock(&mu_);
    while (frames_.empty() && readers_done_ < shared_.members().size - 1) changed_.Wait(&mu_);
    if (!frames_.empty()) {
      const ControlMessage message = frames_.front();
      frames_.pop_front();
      return message;
    }
  }
  return shared_.status();
}

void GlooControlReceiver::Read(int peer) {
  ControlMessage message{peer, {}};
  try {
    ReadFrames(peer, &message);
  } catch (const std::exception& error) {
    OnClosed(peer, error.what());
  }
  const absl::MutexLock lock(&mu_);
  ++readers_done_;
  changed_.SignalAll();
}

void GlooControlReceiver::ReadFrames(int peer, ControlMessage* message) {
  const SigpipeBlock no_signal;
  const auto buffer = shared_.context().createUnboundBuffer(message->frame.data(), kControlBytes);
  for (;;) {
    buffer->recv(peer, kGlooControlSlot);
    if (!Wait(buffer.get())) return;
    const absl::MutexLock lock(&mu_);
    frames_.push_back(*message);
    changed_.SignalAll();
  }
}

// As Guarded, but the exception goes to the one who knows the peer.
bool GlooControlReceiver::Wait(GlooShared::UnboundBuffer* buffer) {
  std::exception_ptr broken;
  const bool done = shared_.Guarded(buffer, [&] {
    try {
      return buffer->waitRecv(kForever);
    } catch (const std::exception&) {
      broken = std::current_exception();
      return false;
    }
  });
  if (broken) std::rethrow_exception(broken);
  return done;
}

void GlooControlReceiver::OnClosed(int peer, const std::string& error) {
  // Gloo itself closes all connections when one of our waits passes its deadline; that wait knows.
  if (error.find("Application timeout") != std::string::npos) return shared_.FailBroken(error);
  shared_.Fail(absl::UnavailableError(
      absl::StrCat("rank ", peer, " is gone: its connection to rank ", shared_.members().rank,
                   " closed (", error, "); look why that process ended")));
}

GlooControl::GlooControl(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {
  for (int peer = 0; peer < size(); ++peer) {
    senders_.push_back(peer == rank() ? nullptr
                                      : std::make_unique<GlooControlSender>(*shared_, peer));
  }
  receiver_ = std::make_unique<GlooControlReceiver>(*shared_);
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
