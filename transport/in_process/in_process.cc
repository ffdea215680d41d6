#include "transport/in_process/in_process.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "transport/in_process/world.h"

namespace thinwire {
namespace {

class InProcessExchange final : public Exchange {
 public:
  InProcessExchange(std::shared_ptr<InProcessWorld> world, int rank, uint64_t tag,
                    std::vector<MutableBytes> recv)
      : world_(std::move(world)), rank_(rank), tag_(tag), recv_(std::move(recv)) {}

  ~InProcessExchange() override {
    if (waited_) return;
    world_->Fail(rank_, absl::InternalError("an exchange was dropped before it was waited for"));
  }

  absl::Status Wait(Deadline deadline) override {
    waited_ = true;
    for (int from = 0; from < static_cast<int>(recv_.size()); ++from) {
      if (from == rank_ || recv_[from].empty()) continue;
      const absl::StatusOr<std::vector<uint8_t>> block =
          world_->TakeBlock(tag_, recv_[from].size(), from, rank_, deadline);
      if (!block.ok()) return block.status();
      std::copy(block->begin(), block->end(), recv_[from].begin());
    }
    return world_->failure(rank_);
  }

 private:
  const std::shared_ptr<InProcessWorld> world_;
  const int rank_;
  const uint64_t tag_;
  const std::vector<MutableBytes> recv_;
  bool waited_ = false;
};

class InProcessData final : public DataPlane {
 public:
  InProcessData(std::shared_ptr<InProcessWorld> world, Membership members)
      : world_(std::move(world)), members_(members) {}

  const Membership& members() const override { return members_; }
  DataTraits traits() const override {
    return {Matching::kByTag, Completion::kBlocking, Memory::kHost};
  }

  // Sending copies, so a sent block needs no further care.
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    for (int to = 0; to < size(); ++to) {
      if (to == rank() || send[to].empty()) continue;
      world_->PutBlock(tag, rank(), to, {send[to].begin(), send[to].end()});
      bytes_sent_ += send[to].size();
    }
    return std::make_unique<InProcessExchange>(world_, rank(), tag,
                                               std::vector<MutableBytes>(recv.begin(), recv.end()));
  }

  void Abort(absl::Status reason) override { world_->Fail(rank(), reason); }
  absl::Status status() const override { return world_->failure(rank()); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<InProcessWorld> world_;
  const Membership members_;
  std::atomic<uint64_t> bytes_sent_{0};
};

class InProcessControl final : public ControlPlane {
 public:
  InProcessControl(std::shared_ptr<InProcessWorld> world, Membership members)
      : world_(std::move(world)), members_(members) {}
  ~InProcessControl() override { world_->Leave(rank()); }

  const Membership& members() const override { return members_; }
  absl::Status Send(int to, const ControlFrame& frame) override {
    return world_->PutFrame(rank(), to, frame);
  }
  absl::StatusOr<ControlMessage> Receive() override { return world_->TakeFrame(rank()); }
  void Abort(absl::Status reason) override { world_->Fail(rank(), reason); }
  void Flush(Deadline) override {}  // sending delivers
  absl::Status status() const override { return world_->failure(rank()); }

 private:
  const std::shared_ptr<InProcessWorld> world_;
  const Membership members_;
};

}  // namespace

std::vector<Transport> MakeInProcessTransports(int size) {
  const auto world = std::make_shared<InProcessWorld>(size);
  std::vector<Transport> transports;
  for (int rank = 0; rank < size; ++rank) {
    const Membership members{rank, size};
    transports.emplace_back(std::make_unique<InProcessControl>(world, members),
                            std::make_unique<InProcessData>(world, members));
  }
  return transports;
}

}  // namespace thinwire
