#include "transport/gloo_control.h"

#include <exception>

#include "absl/strings/str_cat.h"
#include "transport/sigpipe.h"

namespace thinwire {

GlooControlSender::GlooControlSender(GlooShared& shared, int peer)
    : shared_(shared),
      peer_(peer),
      ring_(kFrames),
      buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)),
      reaper_([this] { Reap(); }) {}

absl::Status GlooControlSender::Send(const ControlFrame& frame) {
  const SigpipeBlock no_signal;
  bool crowded;
  {
    const std::lock_guard lock(mu_);
    queue_.push_back(frame);
    PostLocked();
    crowded = CrowdedLocked();
  }
  if (crowded) crowded_.notify_one();
  return shared_.status();
}

// Posts even after a failure: the peers should hear its reason before the connections close.
void GlooControlSender::PostLocked() {
  while (!queue_.empty() && under_way_ < kFrames) {
    const size_t place = next_++ % kFrames;
    ring_[place] = queue_.front();
    queue_.pop_front();
    try {
      buffer_->send(peer_, kGlooControlSlot, place * kControlBytes, kControlBytes);
    } catch (const std::exception& error) {
      return shared_.FailBroken(error.what());
    }
    ++under_way_;
  }
}

// Frames leave in order. Not woken for every one of them: half a ring is soon enough.
void GlooControlSender::Reap() {
  const SigpipeBlock no_signal;
  std::unique_lock lock(mu_);
  for (;;) {
    crowded_.wait(lock, [this] { return stopped_ || CrowdedLocked(); });
    if (stopped_) return;
    lock.unlock();
    const bool left =
        shared_.Guarded(buffer_.get(), [this] { return buffer_->waitSend(kForever); });
    lock.lock();
    if (!left) return;
    --under_way_;
    PostLocked();
  }
}

void GlooControlSender::Stop() {
  {
    const std::lock_guard lock(mu_);
    stopped_ = true;
  }
  crowded_.notify_one();
  if (reaper_.joinable()) reaper_.join();
}

void GlooControlSender::Drain(Deadline deadline) {
  const SigpipeBlock no_signal;
  Stop();
  const std::lock_guard lock(mu_);
  try {
    for (; under_way_ > 0; --under_way_) {
      PostLocked();
      // A wait that an earlier failure ended returns at once, and once only.
      if (!buffer_->waitSend(Until(deadline))) buffer_->waitSend(Until(deadline));
    }
  } catch (const std::exception&) {
    return;  // the peer is gone or does not listen
  }
}

GlooControlReceiver::GlooControlReceiver(GlooShared& shared) : shared_(shared) {
  for (int peer = 0; peer < shared.size(); ++peer) {
    if (peer != shared.rank()) threads_.emplace_back([this, peer] { Read(peer); });
  }
}

GlooControlReceiver::~GlooControlReceiver() {
  for (std::thread& thread : threads_) thread.join();
}

absl::StatusOr<ControlMessage> GlooControlReceiver::Receive() {
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return !frames_.empty() || readers_done_ == shared_.size() - 1; });
  if (frames_.empty()) return shared_.status();
  const ControlMessage message = frames_.front();
  frames_.pop_front();
  return message;
}

void GlooControlReceiver::Read(int peer) {
  ControlMessage message{peer, {}};
  try {
    ReadFrames(peer, &message);
  } catch (const std::exception& error) {
    OnClosed(peer, error.what());
  }
  const std::lock_guard lock(mu_);
  ++readers_done_;
  changed_.notify_all();
}

void GlooControlReceiver::ReadFrames(int peer, ControlMessage* message) {
  const SigpipeBlock no_signal;
  const auto buffer = shared_.context().createUnboundBuffer(message->frame.data(), kControlBytes);
  for (;;) {
    buffer->recv(peer, kGlooControlSlot);
    if (!Wait(buffer.get())) return;
    const std::lock_guard lock(mu_);
    frames_.push_back(*message);
    changed_.notify_all();
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
      absl::StrCat("rank ", peer, " is gone: its connection to rank ", shared_.rank(), " closed (",
                   error, "); look why that process ended")));
}

}  // namespace thinwire
