#include "schedule/order/predicted_queue.h"

#include <algorithm>

namespace thinwire {

void PredictedQueue::Append(const PredictedChunk& chunk) {
  window_bytes_ = size_t{chunk.window_kib} << 10;
  waiting_.push_back(chunk);
  HoldMore();
}

void PredictedQueue::HoldMore() {
  while (held_.size() < std::min(lanes_, started_ + kAhead) && !waiting_.empty()) {
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
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
