#include "schedule/order/predicted_queue.h"

#include <algorithm>

namespace thinwire {

void PredictedWindow::Ready(uint64_t position, size_t bytes) {
  held_.at(position).bytes = bytes;
  ready_.insert(position);
}

bool PredictedWindow::MayStart(uint64_t position, bool overtakes) const {
  if (position == held_.begin()->first) return true;
  if (position != *ready_.begin()) return false;
  const Held& held = held_.at(position);
  return started_ == 0 || started_ + held.bytes <= (overtakes ? held.limit / 2 : held.limit);
}

void PredictedWindow::Start(uint64_t position) {
  ready_.erase(position);
  started_ += held_.at(position).bytes;
}

void PredictedWindow::Finish(uint64_t position) {
  started_ -= held_.at(position).bytes;
  held_.erase(position);
}

void PredictedQueue::Append(const PredictedChunk& chunk) {
  waiting_.push_back(chunk);
  HoldMore();
}

void PredictedQueue::HoldMore() {
  while (held_.size() < std::min(lanes_, started_ + kAhead) && !waiting_.empty()) {
    window_.Hold(next_position_, size_t{waiting_.front().window_kib} << 10);
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
}

size_t PredictedQueue::AtOnce(size_t bytes) const {
  uint32_t most_kib = 0;
  for (const Held& held : held_) most_kib = std::max(most_kib, held.chunk.window_kib);
  for (const PredictedChunk& chunk : waiting_) most_kib = std::max(most_kib, chunk.window_kib);
  const size_t by_window = std::max<size_t>(1, (size_t{most_kib} << 10) / bytes) + 1;
  return std::min({lanes_, size(), by_window});
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
