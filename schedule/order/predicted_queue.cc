#include "schedule/order/predicted_queue.h"

#include <algorithm>

namespace thinwire {

void PredictedWindow::Ready(uint64_t position, size_t bytes) {
  held_[position] = bytes;
  ready_.insert(position);
}

bool PredictedWindow::MayStart(uint64_t position) const {
  if (position == held_.begin()->first) return true;
  if (position != *ready_.begin()) return false;
  return started_ == 0 || started_ + held_.at(position) <= limit_;
}

void PredictedWindow::Start(uint64_t position) {
  ready_.erase(position);
  started_ += held_.at(position);
}

void PredictedWindow::Finish(uint64_t position) {
  started_ -= held_.at(position);
  held_.erase(position);
}

void PredictedQueue::Append(const PredictedChunk& chunk) {
  window_.SetLimit(size_t{chunk.window_kib} << 10);
  waiting_.push_back(chunk);
  HoldMore();
}

void PredictedQueue::HoldMore() {
  while (held_.size() < std::min(lanes_, started_ + kAhead) && !waiting_.empty()) {
    window_.Hold(next_position_);
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
}

void PredictedQueue::Finish(uint64_t position) {
  const auto found = std::find_if(held_.begin(), held_.end(), [position](const Held& held) {
    return held.position == position;
  });
  if (found == held_.end()) return;
  window_.Finish(position);
  if (found->phase == Phase::kStarted) --started_;
  held_.erase(found);
  HoldMore();
}

}  // namespace thinwire
