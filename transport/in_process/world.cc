#include "transport/in_process/world.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/time_left.h"

namespace thinwire {

void InProcessWorld::PutBlock(uint64_t tag, int from, int to, std::vector<uint8_t> block) {
  const absl::MutexLock lock(&mu_);
  blocks_[{tag, block.size(), from, to}].push_back(std::move(block));
  changed_.SignalAll();
}

absl::StatusOr<std::vector<uint8_t>> InProcessWorld::TakeBlock(uint64_t tag, size_t bytes, int from,
                                                               int to, Deadline deadline) {
  const Address address{tag, bytes, from, to};
  const absl::MutexLock lock(&mu_);
  for (;;) {
    if (!ranks_[to].failure.ok()) return ranks_[to].failure;
    if (const auto found = blocks_.find(address); found != blocks_.end()) {
      std::vector<uint8_t> block = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) blocks_.erase(found);
      return block;
    }
    if (Clock::now() >= deadline) break;
    changed_.WaitWithTimeout(&mu_, TimeLeft(deadline));
  }
  FailLocked(
      to, absl::DeadlineExceededError(absl::StrCat("rank ", from, " sent no block of ", bytes,
                                                   " bytes to rank ", to, " before the deadline")));
  return ranks_[to].failure;
}

absl::Status InProcessWorld::PutFrame(int from, int to, const ControlFrame& frame) {
  const absl::MutexLock lock(&mu_);
  ranks_[to].frames.push_back({from, frame});
  changed_.SignalAll();
  return ranks_[from].failure;
}

absl::StatusOr<ControlMessage> InProcessWorld::TakeFrame(int to) {
  const absl::MutexLock lock(&mu_);
  Rank& own = ranks_[to];
  while (own.failure.ok() && own.frames.empty()) changed_.Wait(&mu_);
  if (own.frames.empty()) return own.failure;
  const ControlMessage message = own.frames.front();
  own.frames.pop_front();
  return message;
}

void InProcessWorld::Fail(int rank, const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  FailLocked(rank, reason);
}

void InProcessWorld::Leave(int rank) {
  const absl::MutexLock lock(&mu_);
  FailLocked(rank, absl::CancelledError("the transport was destroyed"));
  const absl::Status gone =
      absl::UnavailableError(absl::StrCat("rank ", rank, " is gone: it closed its transport"));
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    if (static_cast<int>(peer) != rank) FailLocked(static_cast<int>(peer), gone);
  }
}

absl::Status InProcessWorld::failure(int rank) const {
  const absl::MutexLock lock(&mu_);
  return ranks_[rank].failure;
}

void InProcessWorld::FailLocked(int rank, const absl::Status& reason) {
  if (ranks_[rank].failure.ok()) ranks_[rank].failure = reason;
  changed_.SignalAll();
}

}  // namespace thinwire
