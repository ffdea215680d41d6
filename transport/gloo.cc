#include "transport/gloo.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "transport/gloo_connect.h"
#include "transport/gloo_control.h"
#include "transport/gloo_shared.h"
#include "transport/sigpipe.h"

namespace thinwire {
namespace {

using UnboundBuffer = GlooShared::UnboundBuffer;

// Gloo matches messages by slot alone and aborts the process when a matched message has another
// size. So the size is part of the slot: what disagrees never meets.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // even slots are the control channel's
}

class GlooPending final : public Pending {
 public:
  GlooPending(GlooShared& shared, uint64_t tag, std::span<const Bytes> send,
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

  GlooShared& shared_;
  std::vector<std::unique_ptr<UnboundBuffer>> receives_, sends_;
  bool waited_ = false;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<gloo::Context> context) : shared_(std::move(context)) {
    for (int peer = 0; peer < size(); ++peer) {
      senders_.push_back(peer == rank() ? nullptr
                                        : std::make_unique<GlooControlSender>(shared_, peer));
    }
    receiver_ = std::make_unique<GlooControlReceiver>(shared_);
  }

  ~GlooTransport() override {
    const SigpipeBlock no_signal;
    Abort(absl::CancelledError("the transport was destroyed"));
    receiver_.reset();
    FlushControl(Clock::now() + std::chrono::milliseconds(200));
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
  void FlushControl(Deadline deadline) override {
    for (const auto& sender : senders_) {
      if (sender != nullptr) sender->Drain(deadline);
    }
  }
  void Abort(absl::Status reason) override { shared_.Fail(reason); }
  absl::Status status() const override { return shared_.status(); }
  uint64_t bytes_sent() const override { return shared_.bytes_sent; }

 private:
  GlooShared shared_;
  std::vector<std::unique_ptr<GlooControlSender>> senders_;  // null at the own rank
  std::unique_ptr<GlooControlReceiver> receiver_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> ConnectGloo(const GlooOptions& options) {
  absl::StatusOr<std::shared_ptr<gloo::Context>> context = ConnectFullMesh(options);
  if (!context.ok()) return context.status();
  return std::make_unique<GlooTransport>(*std::move(context));
}

}  // namespace thinwire
