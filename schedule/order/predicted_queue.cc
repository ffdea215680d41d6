#include "schedule/order/predicted_queue.h"

#include <algorithm>

namespace thinwire {

void PredictedQueue::Append(const PredictedChunk& chunk) {
  waiting_.push_back(chunk);
  HoldMore();
}

void PredictedQueue::HoldMore() {
  while (held_.size() < std::min(lanes_, started_ + kAhead) && !waiting_.empty()) {
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
}

size_t PredictedQueue::AtOnce(size_t bytes) const {
  size_t most = 0;
  for (const Held& held : held_) most = std::max(most, Window(held.chunk));
  for (const PredictedChunk& chunk : waiting_) most = std::max(most, Window(chunk));
  return std::min({lanes_, size(), std::max<size_t>(1, most / bytes) + 1});
}

void PredictedQueue::Finish(uint64_t position) {
  const auto found = std::find_if(held_.begin(), held_.end(), [position](const Held& held) {
    return held.position == position;
  });
  if (found == held_.end()) return;
  if (found->phase == Phase::kStarted) {
    --started_;
    started_bytes_ -= found->bytes;
  }
  held_.erase(found);
  HoldMore();
}

}  // namespace thinwire
