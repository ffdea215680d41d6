#include "transport/gloo.h"

#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "transport/gloo_connect.h"
#include "transport/sigpipe.h"

namespace thinwire {
namespace {

using gloo::transport::UnboundBuffer;
using std::chrono::milliseconds;

// Gloo closes every connection when one of its waits times out. So its timeouts are only the last
// resort, and what ends a wait early is Abort.
constexpr milliseconds kForever = std::chrono::hours(24 * 365);

milliseconds Until(Deadline deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  return std::clamp(left, milliseconds(1), kForever);
}

// Gloo matches messages by slot alone and aborts the process when a matched message has another
// size. So the size is part of the slot: what disagrees never meets.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // even slots are the control channel's
}
constexpr uint64_t kControlSlot = 2;

// What all parts of one rank's transport share: the first failure, and which waits it must end.
class Shared {
 public:
  explicit Shared(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {}

  gloo::Context& context() { return *context_; }
  int rank() const { return context_->rank; }
  int size() const { return context_->size; }

  void Fail(const absl::Status& reason) {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return;
    status_ = reason;
    for (UnboundBuffer* buffer : waiting_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
    changed_.notify_all();
  }

  absl::Status status() const {
    const std::lock_guard lock(mu_);
    return status_;
  }

  // A connection that broke under an exchange. The control reader of that peer knows its rank and
  // speaks within moments; only if it does not, Gloo's words must do.
  void FailBroken(const std::string& what) {
    {
      std::unique_lock lock(mu_);
      changed_.wait_for(lock, milliseconds(200), [this] { return !status_.ok(); });
    }
    Fail(absl::UnavailableError(absl::StrCat("a connection of rank ", rank(), " broke: ", what)));
  }

  // Runs wait() (a Gloo wait on `buffer`) so that a failure ends it, also one that came first.
  template <typename Wait>
  bool Guarded(UnboundBuffer* buffer, Wait wait) {
    {
      const std::lock_guard lock(mu_);
      if (!status_.ok()) return false;
      waiting_.insert(buffer);
    }
    bool done = false;
    std::string error;
    try {
      done = wait();
    } catch (const std::exception& e) {
      error = e.what();
    }
    {
      const std::lock_guard lock(mu_);
      waiting_.erase(buffer);
    }
    if (!error.empty()) OnError(error);
    return done && error.empty();
  }

  std::atomic<uint64_t> bytes_sent{0};

 private:
  void OnError(const std::string& error) {
    if (error.find("imed out") == std::string::npos) return FailBroken(error);
    Fail(absl::DeadlineExceededError(
        absl::StrCat("rank ", rank(), " waited past its deadline: ", error)));
  }

  const std::shared_ptr<gloo::Context> context_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  absl::Status status_;
  std::unordered_set<UnboundBuffer*> waiting_;
};

class GlooPending final : public Pending {
 public:
  GlooPending(Shared& shared, uint64_t tag, std::span<const Bytes> send,
              std::span<const MutableBytes> recv)
      : shared_(shared) {
    try {
      Post(tag, send, recv);
    } catch (const std::exception& error) {
      shared_.FailBroken(error.what());
    }
  }

  ~GlooPending() override {
    if (!waited_)
      shared_.Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  }

  absl::Status Wait(Deadline deadline) override {
    waited_ = true;
    for (const auto& buffer : receives_) {
      if (!shared_.Guarded(buffer.get(), [&] { return buffer->waitRecv(Until(deadline)); }))
        return Failed();
    }
    for (const auto& buffer : sends_) {
      if (!shared_.Guarded(buffer.get(), [&] { return buffer->waitSend(Until(deadline)); }))
        return Failed();
    }
    return absl::OkStatus();
  }

 private:
  void Post(uint64_t tag, std::span<const Bytes> send, std::span<const MutableBytes> recv) {
    const SigpipeBlock no_signal;
    const int rank = shared_.rank(), size = shared_.size();
    for (int i = 1; i < size; ++i) {
      const int from = (rank + size - i) % size;
      if (recv[from].empty()) continue;
      receives_.push_back(
          shared_.context().createUnboundBuffer(recv[from].data(), recv[from].size()));
      receives_.back()->recv(from, SlotOf(tag, recv[from].size()));
    }
    for (int i = 1; i < size; ++i) {  // every rank begins with another peer
      const int to = (rank + i) % size;
      if (send[to].empty()) continue;
      auto* data = const_cast<uint8_t*>(send[to].data());
      sends_.push_back(shared_.context().createUnboundBuffer(data, send[to].size()));
      sends_.back()->send(to, SlotOf(tag, send[to].size()));
      shared_.bytes_sent += send[to].size();
    }
  }

  // Without their buffers the connections can't touch the blocks any more.
  absl::Status Failed() {
    receives_.clear();
    sends_.clear();
    return shared_.status();
  }

  Shared& shared_;
  std::vector<std::unique_ptr<UnboundBuffer>> receives_, sends_;
  bool waited_ = false;
};

// Frames to one peer. Sending copies into a ring, and waits only when the whole ring is under way.
class ControlSender {
 public:
  ControlSender(Shared& shared, int peer)
      : shared_(shared),
        peer_(peer),
        ring_(kFrames),
        buffer_(shared.context().createUnboundBuffer(ring_.data(), kFrames * kControlBytes)) {}

  absl::Status Send(const ControlFrame& frame) {
    const SigpipeBlock no_signal;
    const std::lock_guard lock(mu_);
    while (under_way_ >= kFrames) {
      if (!WaitOne(kForever)) return shared_.status();
    }
    // Sent even after a failure: the peers should hear its reason before the connections close.
    const size_t place = next_++ % kFrames;
    ring_[place] = frame;
    try {
      buffer_->send(peer_, kControlSlot, place * kControlBytes, kControlBytes);
      ++under_way_;
    } catch (const std::exception& error) {
      shared_.FailBroken(error.what());
    }
    return shared_.status();
  }

  // Gives what was sent a moment to leave, whatever has failed.
  void Drain(Deadline deadline) {
    const std::lock_guard lock(mu_);
    try {
      for (; under_way_ > 0; --under_way_) {
        // A wait that an earlier failure ended returns at once, and once only.
        if (!buffer_->waitSend(Until(deadline))) buffer_->waitSend(Until(deadline));
      }
    } catch (const std::exception&) {
      return;  // the peer is gone or does not listen; the connections close next
    }
  }

 private:
  static constexpr size_t kFrames = 64;

  bool WaitOne(milliseconds timeout) {
    if (!shared_.Guarded(buffer_.get(), [&] { return buffer_->waitSend(timeout); })) return false;
    --under_way_;
    return true;
  }

  Shared& shared_;
  const int peer_;
  std::mutex mu_;
  std::vector<ControlFrame> ring_;
  const std::unique_ptr<UnboundBuffer> buffer_;
  size_t next_ = 0, under_way_ = 0;
};

// Frames from everybody: a thread for each peer, because only a wait that is tied to one
// connection learns that this connection broke.
class ControlReceiver {
 public:
  explicit ControlReceiver(Shared& shared) : shared_(shared) {
    for (int peer = 0; peer < shared.size(); ++peer) {
      if (peer != shared.rank()) threads_.emplace_back([this, peer] { Read(peer); });
    }
  }
  ~ControlReceiver() {
    for (std::thread& thread : threads_) thread.join();
  }

  absl::StatusOr<ControlMessage> Receive() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return !frames_.empty() || readers_done_ == shared_.size() - 1; });
    if (frames_.empty()) return shared_.status();
    const ControlMessage message = frames_.front();
    frames_.pop_front();
    return message;
  }

 private:
  void Read(int peer) {
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

  void OnClosed(int peer, const std::string& error) {
    // Gloo itself closes all connections when one of our waits passes its deadline; that wait
    // knows.
    if (error.find("Application timeout") != std::string::npos) return shared_.FailBroken(error);
    shared_.Fail(absl::UnavailableError(
        absl::StrCat("rank ", peer, " is gone: its connection to rank ", shared_.rank(),
                     " closed (", error, "); look why that process ended")));
  }

  void ReadFrames(int peer, ControlMessage* message) {
    const SigpipeBlock no_signal;
    const auto buffer = shared_.context().createUnboundBuffer(message->frame.data(), kControlBytes);
    for (;;) {
      buffer->recv(peer, kControlSlot);
      if (!Wait(buffer.get())) return;
      const std::lock_guard lock(mu_);
      frames_.push_back(*message);
      changed_.notify_all();
    }
  }

  // As Guarded, but the exception goes to the one who knows the peer.
  bool Wait(UnboundBuffer* buffer) {
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

  Shared& shared_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<ControlMessage> frames_;
  int readers_done_ = 0;
  std::vector<std::thread> threads_;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<gloo::Context> context) : shared_(std::move(context)) {
    for (int peer = 0; peer < size(); ++peer) {
      senders_.push_back(peer == rank() ? nullptr : std::make_unique<ControlSender>(shared_, peer));
    }
    receiver_ = std::make_unique<ControlReceiver>(shared_);
  }

  ~GlooTransport() override {
    const SigpipeBlock no_signal;
    Abort(absl::CancelledError("the transport was destroyed"));
    receiver_.reset();
    const Deadline deadline = Clock::now() + milliseconds(200);
    for (const auto& sender : senders_) {
      if (sender != nullptr) sender->Drain(deadline);
    }
    shared_.context().closeConnections();
  }

  int rank() const override { return shared_.rank(); }
  int size() const override { return shared_.size(); }

  std::unique_ptr<Pending> Start(uint64_t tag, std::span<const Bytes> send,
                                 std::span<const MutableBytes> recv) override {
    return std::make_unique<GlooPending>(shared_, tag, send, recv);
  }
  absl::Status SendControl(int to, const ControlFrame& frame) override {
    return senders_[to]->Send(frame);
  }
  absl::StatusOr<ControlMessage> ReceiveControl() override { return receiver_->Receive(); }
  void Abort(absl::Status reason) override { shared_.Fail(reason); }
  absl::Status status() const override { return shared_.status(); }
  uint64_t bytes_sent() const override { return shared_.bytes_sent; }

 private:
  Shared shared_;
  std::vector<std::unique_ptr<ControlSender>> senders_;  // null at the own rank
  std::unique_ptr<ControlReceiver> receiver_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> ConnectGloo(const GlooOptions& options) {
  absl::StatusOr<std::shared_ptr<gloo::Context>> context = ConnectFullMesh(options);
  if (!context.ok()) return context.status();
  return std::make_unique<GlooTransport>(*std::move(context));
}

}  // namespace thinwire
