#include "transport/in_process.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// What the ranks share: undelivered blocks and frames, and who has failed.
struct World {
  // A block waits under (tag, size, from, to) for its receiver.
  using Address = std::tuple<uint64_t, size_t, int, int>;
  struct Rank {
    absl::Status failure;
    std::deque<ControlMessage> frames;
  };

  explicit World(int size) : ranks(size) {}

  // Under mu. The first failure of a rank stays.
  void FailLocked(int rank, const absl::Status& reason) {
    if (ranks[rank].failure.ok()) ranks[rank].failure = reason;
    changed.notify_all();
  }

  std::mutex mu;
  std::condition_variable changed;
  std::map<Address, std::deque<std::vector<uint8_t>>> blocks;
  std::vector<Rank> ranks;
};

class InProcessPending final : public Pending {
 public:
  InProcessPending(std::shared_ptr<World> world, int rank, uint64_t tag,
                   std::vector<MutableBytes> recv)
      : world_(std::move(world)), rank_(rank), tag_(tag), recv_(std::move(recv)) {}

  ~InProcessPending() override {
    if (waited_) return;
    const std::lock_guard lock(world_->mu);
    world_->FailLocked(rank_,
                       absl::InternalError("an exchange was dropped before it was waited for"));
  }

  absl::Status Wait(Deadline deadline) override {
    waited_ = true;
    for (int from = 0; from < static_cast<int>(recv_.size()); ++from) {
      if (from == rank_ || recv_[from].empty()) continue;
      if (absl::Status status = Receive(from, deadline); !status.ok()) return status;
    }
    const std::lock_guard lock(world_->mu);
    return world_->ranks[rank_].failure;
  }

 private:
  absl::Status Receive(int from, Deadline deadline) {
    const World::Address address{tag_, recv_[from].size(), from, rank_};
    std::unique_lock lock(world_->mu);
    const absl::Status& failure = world_->ranks[rank_].failure;
    world_->changed.wait_until(lock, deadline,
                               [&] { return !failure.ok() || world_->blocks.count(address) > 0; });
    if (!failure.ok()) return failure;
    const auto found = world_->blocks.find(address);
    if (found == world_->blocks.end()) {
      world_->FailLocked(rank_, absl::DeadlineExceededError(absl::StrCat(
                                    "rank ", from, " sent no block of ", recv_[from].size(),
                                    " bytes to rank ", rank_, " before the deadline")));
      return failure;
    }
    const std::vector<uint8_t> block = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) world_->blocks.erase(found);
    lock.unlock();
    std::copy(block.begin(), block.end(), recv_[from].begin());
    return absl::OkStatus();
  }

  const std::shared_ptr<World> world_;
  const int rank_;
  const uint64_t tag_;
  const std::vector<MutableBytes> recv_;
  bool waited_ = false;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<World> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  ~InProcessTransport() override {
    const std::lock_guard lock(world_->mu);
    world_->FailLocked(rank_, absl::CancelledError("the transport was destroyed"));
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      world_->FailLocked(peer, absl::UnavailableError(absl::StrCat(
                                   "rank ", rank_, " is gone: it closed its transport")));
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->ranks.size()); }

  // Sending copies, so a sent block needs no further care.
  std::unique_ptr<Pending> Start(uint64_t tag, std::span<const Bytes> send,
                                 std::span<const MutableBytes> recv) override {
    for (int to = 0; to < size(); ++to) {
      if (to == rank_ || send[to].empty()) continue;
      std::vector<uint8_t> block(send[to].begin(), send[to].end());
      const std::lock_guard lock(world_->mu);
      world_->blocks[{tag, block.size(), rank_, to}].push_back(std::move(block));
      bytes_sent_ += send[to].size();
    }
    world_->changed.notify_all();
    return std::make_unique<InProcessPending>(world_, rank_, tag,
                                              std::vector<MutableBytes>(recv.begin(), recv.end()));
  }

  absl::Status SendControl(int to, const ControlFrame& frame) override {
    const std::lock_guard lock(world_->mu);
    world_->ranks[to].frames.push_back({rank_, frame});
    world_->changed.notify_all();
    return world_->ranks[rank_].failure;
  }

  absl::StatusOr<ControlMessage> ReceiveControl() override {
    std::unique_lock lock(world_->mu);
    World::Rank& own = world_->ranks[rank_];
    world_->changed.wait(lock, [&] { return !own.failure.ok() || !own.frames.empty(); });
    if (own.frames.empty()) return own.failure;
    const ControlMessage message = own.frames.front();
    own.frames.pop_front();
    return message;
  }

  void Abort(absl::Status reason) override {
    const std::lock_guard lock(world_->mu);
    world_->FailLocked(rank_, reason);
  }

  void FlushControl(Deadline) override {}  // sending delivers

  absl::Status status() const override {
    const std::lock_guard lock(world_->mu);
    return world_->ranks[rank_].failure;
  }

  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<World> world_;
  const int rank_;
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeInProcessTransports(int size) {
  const auto world = std::make_shared<World>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < size; ++r)
    transports.push_back(std::make_unique<InProcessTransport>(world, r));
  return transports;
}

}  // namespace thinwire
