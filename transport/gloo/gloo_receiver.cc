#include "transport/gloo/gloo_receiver.h"

#include <atomic>
#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/sigpipe.h"

namespace thinwire {

// A ring of frames from one peer. Gloo sends a message only when its receive is known at the other
// end, so the receives of a whole ring are started ahead, and a frame takes one latency, not two.
// Frames of a connection arrive in the order in which their receives were started.
class GlooReceiver::Inbox final : private GlooLoop::Task {
 public:
  Inbox(GlooShared& shared, int peer)
      : shared_(shared),
        peer_(peer),
        ring_(kFrames),
        buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)) {
    Start(kFrames);
  }
  ~Inbox() { shared_.loop().Sync(); }

  // The next frame, valid until the next call; null when the plane has failed. Throws when the
  // connection broke and all frames that came before were taken.
  const ControlFrame* Next() {
    if (broke_.empty()) {
      if (taken_ > 0 && taken_ % kHalf == 0) Start(kHalf);
      if (Wait()) return Take();
      if (broke_.empty()) return nullptr;
    }
    AwaitLate();
    return Take();
  }

 private:
  static constexpr size_t kFrames = 16, kHalf = kFrames / 2;

  void Start(size_t frames) {
    to_start_ += frames;
    shared_.loop().Post(this);
  }

  // On the loop's thread.
  void Run() override {
    try {
      for (size_t frames = to_start_.exchange(0); frames > 0; --frames) {
        const size_t place = started_ % kFrames;
        buffer_->recv(peer_, kGlooControlSlot, place * kControlBytes, kControlBytes);
        ++started_;
      }
    } catch (const std::exception& error) {
      not_started_ = error.what();
      buffer_->abortWaitRecv();
    }
  }

  const ControlFrame* Take() { return &ring_[taken_++ % kFrames]; }

  // As Guarded, but what the connection broke by is kept for the one who knows the peer.
  bool Wait() {
    const bool done = shared_.Guarded(buffer_.get(), [&] {
      try {
        return buffer_->waitRecv(kForever);
      } catch (const std::exception& error) {
        broke_ = error.what();
        return false;
      }
    });
    if (done) return true;
    shared_.loop().Sync();
    if (broke_.empty()) broke_ = not_started_;
    return false;
  }

  // Gloo ends a wait because the connection broke before it looks whether the frame has come; a
  // peer's last word and its end may both come before this thread wakes. A second wait looks first.
  // It does not block, since a break ends every receive that was started and got nothing.
  void AwaitLate() {
    if (taken_ == started_) throw std::runtime_error(broke_);
    // A wait that was aborted returns at once, and once only.
    if (!buffer_->waitRecv(kForever)) buffer_->waitRecv(kForever);
  }

  GlooShared& shared_;
  const int peer_;
  std::vector<ControlFrame> ring_;
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  size_t taken_ = 0;
  std::atomic<size_t> to_start_{0};
  std::string broke_;        // why the connection is no more
  size_t started_ = 0;       // the loop's: receives
  std::string not_started_;  // the loop's: why no more
};

GlooReceiver::GlooReceiver(GlooShared& shared) : shared_(shared) {
  const Membership& members = shared.members();
  for (int peer = 0; peer < members.size; ++peer) {
    if (peer != members.rank) threads_.emplace_back([this, peer] { Read(peer); });
  }
}

GlooReceiver::~GlooReceiver() {
  for (std::thread& thread : threads_) thread.join();
}

absl::StatusOr<ControlMessage> GlooReceiver::Receive() {
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

void GlooReceiver::Read(int peer) {
  const SigpipeBlock no_signal;
  try {
    Inbox inbox(shared_, peer);
    while (const ControlFrame* frame = inbox.Next()) {
      const absl::MutexLock lock(&mu_);
      frames_.push_back({peer, *frame});
      changed_.SignalAll();
    }
  } catch (const std::exception& error) {
    OnClosed(peer, error.what());
  }
  const absl::MutexLock lock(&mu_);
  ++readers_done_;
  changed_.SignalAll();
}

void GlooReceiver::OnClosed(int peer, const std::string& error) {
  // Gloo itself closes all connections when one of our waits passes its deadline; that wait knows.
  if (error.find("Application timeout") != std::string::npos) return shared_.FailBroken(error);
  shared_.Fail(absl::UnavailableError(
      absl::StrCat("rank ", peer, " is gone: its connection to rank ", shared_.members().rank,
                   " closed (", error, "); look why that process ended")));
}

}  // namespace thinwire
