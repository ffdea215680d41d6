#include "schedule/engine/attendance.h"

#include <algorithm>
#include <thread>

#include "schedule/engine/told.h"
#include "schedule/order/frames.h"

namespace thinwire {
namespace {

constexpr std::chrono::milliseconds kPause(2);  // between two looks

}  // namespace

absl::StatusOr<std::vector<int>> SilentRanks(ControlPlane& control,
                                             std::chrono::milliseconds patience) {
  control.SendToAll(PackSignal(FrameType::kPong));
  std::vector<bool> is_here(control.size());
  is_here[control.rank()] = true;
  const Deadline end = Clock::now() + patience;
  for (;;) {
    const bool is_last = Clock::now() >= end;
    if (absl::Status told = ToldReason(control, &is_here); !told.ok()) return told;
    if (is_last || std::find(is_here.begin(), is_here.end(), false) == is_here.end()) break;
    std::this_thread::sleep_for(kPause);
  }
  std::vector<int> silent;
  for (int rank = 0; rank < control.size(); ++rank) {
    if (!is_here[rank]) silent.push_back(rank);
  }
  return silent;
}

}  // namespace thinwire
