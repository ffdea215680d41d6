#include "schedule/plan_window.h"

namespace thinwire {

void PlanWindow::Ready(uint64_t place, size_t bytes) {
  held_[place] = bytes;
  ready_.insert(place);
}

bool PlanWindow::MayStart(uint64_t place) const {
  if (place == held_.begin()->first) return true;
  if (place != *ready_.begin()) return false;
  return started_ == 0 || started_ + held_.at(place) <= limit_;
}

void PlanWindow::Start(uint64_t place) {
  ready_.erase(place);
  started_ += held_.at(place);
}

void PlanWindow::Finish(uint64_t place) {
  started_ -= held_.at(place);
  held_.erase(place);
}

}  // namespace thinwire
