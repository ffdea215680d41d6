#include "schedule/engine/attendance.h"

#include <algorithm>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/engine/told.h"
#include "schedule/order/frames.h"

namespace thinwire {
namespace {

constexpr std::chrono::milliseconds kPause(2);  // between two looks
constexpr std::chrono::milliseconds kMostPatience(250);

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

absl::Status LateError(ControlPlane& control, std::string_view what,
                       std::chrono::milliseconds timeout) {
  const absl::StatusOr<std::vector<int>> silent =
      SilentRanks(control, std::min(timeout / 30, kMostPatience));
  if (!silent.ok()) return silent.status();
  const std::string late = absl::StrCat("rank ", control.rank(), " ", std::string(what), ": ");
  if (silent->empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        late, "all ranks are there; look at the network between them, or raise the timeout"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(late, silent->size() == 1 ? "rank " : "ranks ", absl::StrJoin(*silent, ", "),
                   " did not answer; look what that process does, or raise the timeout"));
}

}  // namespace thinwire
