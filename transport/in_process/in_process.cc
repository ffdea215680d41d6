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
                    std::vector<MutableBytes> recv, absl::Status not_sent)
      : world_(std::move(world)),
        rank_(rank),
        tag_(tag),
        recv_(std::move(recv)),
        not_sent_(std::move(not_sent)) {}

  ~InProcessExchange() override {
    if (waited_) return;
    world_->failure(rank_)->Fail(
        absl::InternalError("an exchange was dropped before it was waited for"));
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
    absl::Status status = world_->failure(rank_)->reason();
    status.Update(not_sent_);
    return status;
  }

 private:
  const std::shared_ptr<InProcessWorld> world_;
  const int rank_;
  const uint64_t tag_;
  const std::vector<MutableBytes> recv_;
  const absl::Status not_sent_;  // why a block went nowhere: its receiver was lost
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
    absl::Status not_sent;
    for (int to = 0; to < size(); ++to) {
      if (to == rank() || send[to].empty()) continue;
      not_sent.Update(failure()->peer_reason(to));
      world_->PutBlock(tag, rank(), to, {send[to].begin(), send[to].end()});
      bytes_sent_ += send[to].size();
    }
    return std::make_unique<InProcessExchange>(world_, rank(), tag,
                                               std::vector<MutableBytes>(recv.begin(), recv.end()),
                                               std::move(not_sent));
  }

  const std::shared_ptr<Failure>& failure() const override { return world_->failure(rank()); }
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
  void Flush(Deadline) override {}  // sending delivers
  const std::shared_ptr<Failure>& failure() const override { return world_->failure(rank()); }

 private:
  const std::shared_ptr<InProcessWorld> world_;
  const Membership members_;
};

}  // namespace

std::vector<Transport> MakeInProcessTransports(int size) {
  return MakeInProcessTransportsWith(Failure::LostPeer::kFailsAll, size);
}

std::vector<Transport> MakeInProcessTransportsWith(Failure::LostPeer lost_peer, int size) {
  const auto world = std::make_shared<InProcessWorld>(size, lost_peer);
  std::vector<Transport> transports;
  for (int rank = 0; rank < size; ++rank) {
    const Membership members{rank, size};
    transports.emplace_back(std::make_unique<InProcessControl>(world, members),
                            std::make_unique<InProcessData>(world, members));
  }
  return transports;
}

}  // namespace thinwire
