#include "transport/gloo/gloo.h"

#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "transport/gloo/gloo_connect.h"
#include "transport/gloo/gloo_control.h"
#include "transport/gloo/gloo_shared.h"
#include "transport/gloo/sigpipe.h"

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

class GlooExchange final : public Exchange {
 public:
  explicit GlooExchange(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {}

  ~GlooExchange() override {
    if (!waited_)
      shared_->Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  }

  // Throws where a connection is closed.
  void Post(uint64_t tag, std::span<const Bytes> send, std::span<const MutableBytes> recv,
            std::atomic<uint64_t>* bytes_sent) {
    const SigpipeBlock no_signal;
    const auto [rank, size] = shared_->members();
    for (int i = 1; i < size; ++i) {
      const int from = (rank + size - i) % size;
      if (recv[from].empty()) continue;
      receives_.push_back(
          shared_->context().createUnboundBuffer(recv[from].data(), recv[from].size()));
      receives_.back()->recv(from, SlotOf(tag, recv[from].size()));
    }
    for (int i = 1; i < size; ++i) {  // every rank begins with another peer
      const int to = (rank + i) % size;
      if (send[to].empty()) continue;
      auto* data = const_cast<uint8_t*>(send[to].data());
      sends_.push_back(shared_->context().createUnboundBuffer(data, send[to].size()));
      sends_.back()->send(to, SlotOf(tag, send[to].size()));
      *bytes_sent += send[to].size();
    }
  }

  absl::Status Wait(Deadline deadline) override {
    waited_ = true;
    for (const auto& buffer : receives_) {
      if (!shared_->Guarded(buffer.get(), [&] { return buffer->waitRecv(Until(deadline)); }))
        return Failed();
    }
    for (const auto& buffer : sends_) {
      if (!shared_->Guarded(buffer.get(), [&] { return buffer->waitSend(Until(deadline)); }))
        return Failed();
    }
    return absl::OkStatus();
  }

 private:
  // Without their buffers the connections can't touch the blocks any more.
  absl::Status Failed() {
    receives_.clear();
    sends_.clear();
    return shared_->status();
  }

  const std::shared_ptr<GlooShared> shared_;
  std::vector<std::unique_ptr<UnboundBuffer>> receives_, sends_;
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
    auto exchange = std::make_unique<GlooExchange>(shared_);
    try {
      exchange->Post(tag, send, recv, &bytes_sent_);
    } catch (const std::exception& error) {
      shared_->FailBroken(error.what());
    }
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
