#include "schedule/plan_window.h"

namespace thinwire {

bool PlanWindow::MayStart(uint64_t place) const {
  if (place == *held_.begin()) return true;
  return started_ < limit_ && place == *ready_.begin();
}

void PlanWindow::Start(uint64_t place) {
  ready_.erase(place);
  ++started_;
}

void PlanWindow::Finish(uint64_t place) {
  held_.erase(place);
  --started_;
}

}  // namespace thinwire
