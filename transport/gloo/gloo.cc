#include "transport/gloo/gloo.h"

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_control.h"
#include "transport/gloo/gloo_shared.h"

namespace thinwire {
namespace {

using UnboundBuffer = GlooShared::UnboundBuffer;

// Gloo matches messages by slot alone and aborts the process when a matched message has another
// size. So the size is part of the slot: what disagrees never meets.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // even slots are the control plane's
}

// The blocks' buffers are made by the caller; Gloo's loop starts them.
class GlooExchange final : public Exchange, private GlooLoop::Task {
 public:
  GlooExchange(std::shared_ptr<GlooShared> shared, uint64_t tag)
      : shared_(std::move(shared)), tag_(tag) {}

  ~GlooExchange() override {
    if (waited_) return;
    shared_->Fail(absl::InternalError("an exchange was dropped before it was waited for"));
    AwaitStart();
  }

  // Returns the bytes to send.
  uint64_t Start(std::span<const Bytes> send, std::span<const MutableBytes> recv) {
    const auto [rank, size] = shared_->members();
    uint64_t bytes = 0;
    for (int i = 1; i < size; ++i) {
      const int from = (rank + size - i) % size;
      if (!recv[from].empty()) receives_.push_back(BlockOf(from, recv[from]));
    }
    for (int i = 1; i < size; ++i) {  // every rank begins with another peer
      const int to = (rank + i) % size;
      if (send[to].empty()) continue;
      sends_.push_back(BlockOf(to, {const_cast<uint8_t*>(send[to].data()), send[to].size()}));
      bytes += send[to].size();
    }
    shared_->loop().Post(this);
    return bytes;
  }

  absl::Status Wait(Deadline deadline) override {
    waited_ = true;
    bool done = true;
    for (const Block& block : receives_) {
      done = done && shared_->Guarded(block.buffer.get(),
                                      [&] { return block.buffer->waitRecv(Until(deadline)); });
    }
    for (const Block& block : sends_) {
      done = done && shared_->Guarded(block.buffer.get(),
                                      [&] { return block.buffer->waitSend(Until(deadline)); });
    }
    AwaitStart();
    if (done) return absl::OkStatus();
    if (!broken_.empty()) shared_->FailBroken(broken_);
    // Without their buffers the connections can't touch the blocks any more.
    receives_.clear();
    sends_.clear();
    return shared_->status();
  }

 private:
  struct Block {
    int peer;
    uint64_t slot;
    std::unique_ptr<UnboundBuffer> buffer;
  };

  Block BlockOf(int peer, MutableBytes bytes) {
    return {peer, SlotOf(tag_, bytes.size()),
            shared_->context().createUnboundBuffer(bytes.data(), bytes.size())};
  }

  // On the loop's thread. The waiter may be done, and destroy this, once `started_` is true.
  void Run() override {
    try {
      for (const Block& block : receives_) block.buffer->recv(block.peer, block.slot);
      for (const Block& block : sends_) block.buffer->send(block.peer, block.slot);
    } catch (const std::exception& error) {  // the connection is closed
      broken_ = error.what();
      for (const Block& block : receives_) block.buffer->abortWaitRecv();
      for (const Block& block : sends_) block.buffer->abortWaitSend();
    }
    started_.store(true, std::memory_order_release);
  }

  // The loop is done with the start nearly always before what it started is.
  void AwaitStart() {
    if (!started_.load(std::memory_order_acquire)) shared_->loop().Sync();
  }

  const std::shared_ptr<GlooShared> shared_;
  const uint64_t tag_;
  std::vector<Block> receives_, sends_;
  std::string broken_;  // why the start failed; the loop's until started_
  std::atomic<bool> started_{false};
  bool waited_ = false;
};

class GlooData final : public DataPlane {
 public:
  explicit GlooData(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {}

  const Membership& members() const override { return shared_->members(); }
  DataTraits traits() const override {
    return {Matching::kByTag, Completion::kBlocking, Memory::kHost};
  }

  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    auto exchange = std::make_unique<GlooExchange>(shared_, tag);
    bytes_sent_ += exchange->Start(send, recv);
    return exchange;
  }

  void Abort(absl::Status reason) override { shared_->Fail(reason); }
  absl::Status status() const override { return shared_->status(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<GlooShared> shared_;
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace

absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options) {
  absl::StatusOr<std::shared_ptr<gloo::Context>> context = ConnectFullMesh(options);
  if (!context.ok()) return context.status();
  const auto shared = std::make_shared<GlooShared>(*std::move(context));
  return Transport(std::make_unique<GlooControl>(shared), std::make_unique<GlooData>(shared));
}

}  // namespace thinwire
