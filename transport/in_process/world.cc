#include "transport/in_process/world.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/time_left.h"

namespace thinwire {

InProcessWorld::InProcessWorld(int size, Failure::LostPeer lost_peer) : frames_(size) {
  for (int rank = 0; rank < size; ++rank) {
    failures_.push_back(Failure::Make(lost_peer));
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
      if (absl::Status gone = failures_[to]->peer_reason(from); !gone.ok()) return gone;
      if (const auto found = blocks_.find(address); found != blocks_.end()) {
        std::vector<uint8_t> block = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) blocks_.erase(found);
        return block;
      }
      if (Clock::now() >= deadline) break;
      changed_.WaitWithTimeout(&mu_, TimeLeft(deadline));
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
  return failures_[from]->peer_reason(to);
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
    if (static_cast<int>(peer) != rank) failures_[peer]->LosePeer(rank, gone);
  }
}

}  // namespace thinwire
