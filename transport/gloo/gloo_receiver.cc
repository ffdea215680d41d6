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
  // connection broke.
  const ControlFrame* Next() {
    if (taken_ > 0 && taken_ % kHalf == 0) Start(kHalf);
    if (!Wait()) return nullptr;
    return &ring_[taken_++ % kFrames];
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
        const size_t place = started_++ % kFrames;
        buffer_->recv(peer_, kGlooControlSlot, place * kControlBytes, kControlBytes);
      }
    } catch (const std::exception& error) {
      broken_ = error.what();
      buffer_->abortWaitRecv();
    }
  }

  // As Guarded, but the exception goes to the one who knows the peer.
  bool Wait() {
    std::exception_ptr broken;
    const bool done = shared_.Guarded(buffer_.get(), [&] {
      try {
        return buffer_->waitRecv(kForever);
      } catch (const std::exception&) {
        broken = std::current_exception();
        return false;
      }
    });
    if (broken) std::rethrow_exception(broken);
    if (done) return true;
    shared_.loop().Sync();
    if (!broken_.empty()) throw std::runtime_error(broken_);
    return false;
  }

  GlooShared& shared_;
  const int peer_;
  std::vector<ControlFrame> ring_;
  const std::unique_ptr<GlooShared::UnboundBuffer> buffer_;  // the ring
  size_t taken_ = 0;
  std::atomic<size_t> to_start_{0};
  size_t started_ = 0;  // the loop's
  std::string broken_;  // the loop's: why no receive could be started
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
