#include "transport/staged/staged.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {

// Pinned blocks, kept for the next exchange: pinning is slow.
class Staged::Pinned {
 public:
  explicit Pinned(Device& device) : device_(device) {}

  struct Block {
    DeviceMemory memory;
    size_t bytes = 0;
    MutableBytes first(size_t count) const { return {memory.get(), count}; }
  };

  absl::StatusOr<Block> Take(size_t bytes) {
    {
      const absl::MutexLock lock(&mu_);
      const auto found = std::find_if(free_.begin(), free_.end(),
                                      [bytes](const Block& block) { return block.bytes >= bytes; });
      if (found != free_.end()) {
        Block block = std::move(*found);
        free_.erase(found);
        return block;
      }
    }
    absl::StatusOr<DeviceMemory> memory = device_.AllocatePinned(bytes);
    if (!memory.ok()) return memory.status();
    return Block{*std::move(memory), bytes};
  }

  // A block that the stream still copies from may be given back: whoever takes it writes to it by
  // the same stream, or after Start has waited for that.
  void Give(Block block) {
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(block));
  }

 private:
  Device& device_;
  absl::Mutex mu_;
  std::vector<Block> free_ ABSL_GUARDED_BY(mu_);
};

// An exchange in flight. One that was never waited for fails the host's plane, as the contract
// says, before its blocks go.
class Staged::InFlight final : public Exchange {
 public:
  InFlight(Staged& staged, std::span<const MutableBytes> recv)
      : host_(staged.host_),
        stream_(staged.stream_),
        pinned_(staged.pinned_),
        recv_(recv.begin(), recv.end()) {}
  ~InFlight() override {
    inner_.reset();
    for (Pinned::Block& block : blocks_) pinned_->Give(std::move(block));
  }

  absl::Status Begin(uint64_t tag, std::span<const Bytes> send, Deadline deadline) {
    std::vector<Bytes> out(send.size());
    for (size_t r = 0; r < send.size(); ++r) {
      if (r == static_cast<size_t>(host_.rank()) || send[r].empty()) continue;
      if (absl::Status status = ToHost(send, r, &out); !status.ok()) return status;
    }
    in_.resize(recv_.size());
    for (size_t r = 0; r < recv_.size(); ++r) {
      if (r == static_cast<size_t>(host_.rank()) || recv_[r].empty()) continue;
      absl::StatusOr<Pinned::Block> block = Take(recv_[r].size());
      if (!block.ok()) return block.status();
      in_[r] = block->first(recv_[r].size());
    }
    if (absl::Status status = stream_.Synchronize(deadline); !status.ok()) return status;
    inner_ = host_.Start(tag, out, in_);
    return absl::OkStatus();
  }
  void Fail(absl::Status status) { failed_ = std::move(status); }

  absl::Status Wait(Deadline deadline) override {
    if (!failed_.ok()) return failed_;
    if (absl::Status status = inner_->Wait(deadline); !status.ok()) return status;
    for (size_t r = 0; r < in_.size(); ++r) {
      if (!in_[r].empty()) stream_.Copy(recv_[r].data(), in_[r].data(), in_[r].size());
    }
    return stream_.status();
  }

 private:
  // An all-gather sends one block to everybody, and copies it once.
  absl::Status ToHost(std::span<const Bytes> send, size_t r, std::vector<Bytes>* out) {
    for (size_t other = 0; other < r; ++other) {
      if (send[other].data() == send[r].data() && (*out)[other].size() == send[r].size()) {
        (*out)[r] = (*out)[other];
        return absl::OkStatus();
      }
    }
    absl::StatusOr<Pinned::Block> block = Take(send[r].size());
    if (!block.ok()) return block.status();
    const MutableBytes bytes = block->first(send[r].size());
    stream_.Copy(bytes.data(), send[r].data(), bytes.size());
    (*out)[r] = bytes;
    return absl::OkStatus();
  }

  absl::StatusOr<Pinned::Block> Take(size_t bytes) {
    absl::StatusOr<Pinned::Block> block = pinned_->Take(bytes);
    if (block.ok()) blocks_.push_back(*block);
    return block;
  }

  DataPlane& host_;
  DeviceStream& stream_;
  const std::shared_ptr<Pinned> pinned_;
  const std::vector<MutableBytes> recv_;  // of the device
  std::vector<MutableBytes> in_;          // pinned
  std::vector<Pinned::Block> blocks_;
  std::unique_ptr<Exchange> inner_;
  absl::Status failed_;
};

Staged::Staged(DataPlane& host, Device& device, DeviceStream& stream,
               std::chrono::milliseconds patience)
    : host_(host),
      stream_(stream),
      patience_(patience),
      pinned_(std::make_shared<Pinned>(device)) {}

// Pinned memory goes when nothing copies from it any more.
Staged::~Staged() { stream_.Synchronize(Clock::now() + patience_).IgnoreError(); }

std::unique_ptr<Exchange> Staged::Start(uint64_t tag, std::span<const Bytes> send,
                                        std::span<const MutableBytes> recv) {
  auto exchange = std::make_unique<InFlight>(*this, recv);
  if (absl::Status status = exchange->Begin(tag, send, Clock::now() + patience_); !status.ok()) {
    // Peers wait for what will not come.
    host_.Abort(status);
    exchange->Fail(std::move(status));
  }
  return exchange;
}

}  // namespace thinwire
