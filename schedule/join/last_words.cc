#include "schedule/join/last_words.h"

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/order/frames.h"

namespace thinwire {
namespace {

constexpr std::chrono::milliseconds kPause(2);  // between two looks
constexpr std::chrono::milliseconds kMostPatience(250);

// Takes the frames that have arrived, up to the first that tells a failure, and returns that
// failure, else OK. The plane has failed, so this does not wait. Sets heard_from by rank.
absl::Status FailureTold(ControlPlane& control, std::vector<bool>& heard_from) {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = control.Receive();
    if (!message.ok()) return absl::OkStatus();
    heard_from[message->from] = true;
    const std::optional<ParsedFrame> parsed = ParseFrame(message->frame);
    if (parsed.has_value() && !parsed->failure.ok()) return parsed->failure;
  }
}

}  // namespace

absl::Status TellWhy(ControlPlane& control, absl::Status reason) {
  const bool failed_before = !control.status().ok();
  control.Abort(reason);
  if (failed_before) {
    std::vector<bool> heard_from(control.size());
    if (absl::Status told = FailureTold(control, heard_from); !told.ok()) reason = told;
  }
  control.SendToAll(PackFailure(reason));
  control.Flush(Clock::now() + kMostPatience);
  return reason;
}

absl::Status GiveUp(Transport& transport, absl::Status reason) {
  reason = TellWhy(*transport.control, std::move(reason));
  transport.Reset();
  return reason;
}

absl::Status LateError(int rank, const std::string& what, std::span<const int> silent) {
  const std::string late = absl::StrCat("rank ", rank, " could not ", what, " in time: ");
  if (silent.empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        late, "all ranks are there; look at the network between them, or raise the timeout"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(late, silent.size() == 1 ? "rank " : "ranks ", absl::StrJoin(silent, ", "),
                   " did not answer; look at what that process does, or raise the timeout"));
}

absl::Status FindSilentRanks(ControlPlane& control, const std::string& what,
                             std::chrono::milliseconds timeout) {
  control.SendToAll(PackSignal(FrameType::kPong));
  std::vector<bool> is_awake(control.size());
  is_awake[control.rank()] = true;
  const Deadline end = Clock::now() + std::min(timeout / 30, kMostPatience);
  for (;;) {
    const bool is_last = Clock::now() >= end;
    if (absl::Status told = FailureTold(control, is_awake); !told.ok()) return told;
    if (is_last || std::find(is_awake.begin(), is_awake.end(), false) == is_awake.end()) break;
    std::this_thread::sleep_for(kPause);
  }
  std::vector<int> silent;
  for (int rank = 0; rank < control.size(); ++rank) {
    if (!is_awake[rank]) silent.push_back(rank);
  }
  return LateError(control.rank(), what, silent);
}

}  // namespace thinwire
