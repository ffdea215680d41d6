#include "transport/in_process/in_process.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/planes.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"

namespace thinwire {
namespace {

// Shared by the ranks of one process: blocks and frames that were not taken yet, and the failure of
// each rank. Thread-safe.
class InProcessWorld {
 public:
  explicit InProcessWorld(int size);

  void PutBlock(uint64_t tag, int from, int to, std::vector<uint8_t> block);
  // Waits for a block of that tag and size. Passing the deadline fails rank `to`.
  absl::StatusOr<std::vector<uint8_t>> TakeBlock(uint64_t tag, size_t bytes, int from, int to,
                                                 Deadline deadline);

  absl::Status PutFrame(int from, int to, const ControlFrame& frame);
  absl::StatusOr<ControlMessage> TakeFrame(int to);

  // Fails the rank, and all its peers because they lose it.
  void Leave(int rank);
  const std::shared_ptr<Failure>& failure(int rank) const { return failures_[rank]; }

 private:
  // A block waits under (tag, size, from, to) for its receiver.
  using Address = std::tuple<uint64_t, size_t, int, int>;

  std::vector<std::shared_ptr<Failure>> failures_;  // by rank
  absl::Mutex mu_;
  SteadyCondVar changed_;  // a block or a frame arrived, or a rank failed
  std::map<Address, std::deque<std::vector<uint8_t>>> blocks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::deque<ControlMessage>> frames_ ABSL_GUARDED_BY(mu_);  // by rank
  std::vector<Failure::Listener> listeners_;                             // destroyed first
};

InProcessWorld::InProcessWorld(int size) : frames_(size) {
  for (int rank = 0; rank < size; ++rank) {
    failures_.push_back(Failure::Make());
    listeners_.push_back(failures_.back()->Listen([this] {
      const absl::MutexLock lock(&mu_);
      changed_.SignalAll();
    }));
  }
}

void InProcessWorld::PutBlock(uint64_t tag, int from, int to, std::vector<uint8_t> block) {
  const absl::MutexLock lock(&mu_);
  blocks_[{tag, block.size(), from, to}].push_back(std::move(block));
  changed_.SignalAll();
}

absl::StatusOr<std::vector<uint8_t>> InProcessWorld::TakeBlock(uint64_t tag, size_t bytes, int from,
                                                               int to, Deadline deadline) {
  const Address address{tag, bytes, from, to};
  {
    const absl::MutexLock lock(&mu_);
    for (;;) {
      if (failures_[to]->failed()) return failures_[to]->reason();
      if (const auto found = blocks_.find(address); found != blocks_.end()) {
        std::vector<uint8_t> block = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) blocks_.erase(found);
        return block;
      }
      if (Clock::now() >= deadline) break;
      changed_.WaitUntil(&mu_, deadline);
    }
  }
  failures_[to]->Fail(absl::DeadlineExceededError(absl::StrCat(
      "rank ", from, " sent no block of ", bytes, " bytes to rank ", to, " before the deadline")));
  return failures_[to]->reason();
}

absl::Status InProcessWorld::PutFrame(int from, int to, const ControlFrame& frame) {
  {
    const absl::MutexLock lock(&mu_);
    frames_[to].push_back({from, frame});
    changed_.SignalAll();
  }
  return failures_[from]->reason();
}

absl::StatusOr<ControlMessage> InProcessWorld::TakeFrame(int to) {
  const absl::MutexLock lock(&mu_);
  std::deque<ControlMessage>& frames = frames_[to];
  while (!failures_[to]->failed() && frames.empty()) changed_.Wait(&mu_);
  if (frames.empty()) return failures_[to]->reason();
  const ControlMessage message = frames.front();
  frames.pop_front();
  return message;
}

void InProcessWorld::Leave(int rank) {
  failures_[rank]->Fail(absl::CancelledError("the transport was destroyed"));
  const absl::Status gone =
      absl::UnavailableError(absl::StrCat("rank ", rank, " is gone: it closed its transport"));
  for (size_t peer = 0; peer < failures_.size(); ++peer) {
    if (static_cast<int>(peer) != rank) failures_[peer]->Fail(gone);
  }
}

class InProcessExchange final : public Exchange {
 public:
  InProcessExchange(std::shared_ptr<InProcessWorld> world, int rank, uint64_t tag,
                    std::vector<MutableBytes> recv)
      : world_(std::move(world)), rank_(rank), tag_(tag), recv_(std::move(recv)) {}

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
    return world_->failure(rank_)->reason();
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

  // Sending copies, so a sent block may change afterwards.
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
