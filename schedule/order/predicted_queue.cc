#include "schedule/order/predicted_queue.h"

#include <algorithm>
#include <utility>

namespace thinwire {

PredictedQueue::PredictedQueue(int lanes, std::vector<double> hop_shares)
    : lanes_(lanes), hop_shares_(std::move(hop_shares)) {
  for (const double share : hop_shares_) hops_ += share > 0.0 ? 1 : 0;
  for (size_t hop = hop_shares_.size(); hop-- > 1;) {
    if (hop_shares_[hop - 1] == 0.0) hop_shares_[hop - 1] = hop_shares_[hop];
  }
}

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
  return std::min({lanes_, size(), std::max<size_t>(1, most * hops_ / bytes) + 1});
}

std::deque<PredictedQueue::Held>::iterator PredictedQueue::Find(uint64_t position) {
  return std::find_if(held_.begin(), held_.end(),
                      [position](const Held& held) { return held.position == position; });
}

void PredictedQueue::EndHop(uint64_t position) {
  const auto held = Find(position);
  if (held == held_.end() || held->phase != Phase::kStarted) return;
  hop_bytes_ -= HopBytes(*held);
  ++held->hop;
  hop_bytes_ += HopBytes(*held);
}

void PredictedQueue::Finish(uint64_t position) {
  const auto held = Find(position);
  if (held == held_.end()) return;
  if (held->phase == Phase::kStarted) {
    --started_;
    hop_bytes_ -= HopBytes(*held);
  }
  held_.erase(held);
  HoldMore();
}

}  // namespace thinwire
