#include "schedule/order/predicted_window.h"

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

}  // namespace thinwire
