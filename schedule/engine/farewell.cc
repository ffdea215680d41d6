#include "schedule/engine/farewell.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

constexpr std::chrono::seconds kByes(2);  // a rank that stays must not keep us
const absl::Duration kTurn = absl::Milliseconds(20);

}  // namespace

absl::Status Farewell::Reason() const {
  return absl::UnavailableError(
      absl::StrCat("rank ", first_, " closed its communicator after ", counted_,
                   " collectives, and rank ", members_.rank, " has started ", started_,
                   "; let every rank make the same calls before one of them closes"));
}

void Farewell::OnStarted(uint64_t started) {
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    started_ = std::max(started_, started);
    if (!IsCut()) return;
    reason = Reason();
  }
  failure_.Fail(reason, Tell::kEveryone);
}

void Farewell::OnBye(int from, uint64_t started) {
  absl::Status reason;
  {
    const absl::MutexLock lock(&mu_);
    if (++byes_ == 1 || started < counted_) {
      first_ = from;
      counted_ = started;
    }
    if (!IsCut()) return;
    reason = Reason();
  }
  failure_.Fail(reason, Tell::kEveryone);
}

void Farewell::OnControlLost(const absl::Status& reason) {
  absl::Status known = reason;
  bool parted;
  {
    const absl::MutexLock lock(&mu_);
    parted = said_;
    if (byes_ > 0) known = Reason();
  }
  failure_.OnControlLost(known, parted ? Tell::kNobody : Tell::kEveryone);
}

void Farewell::Say() {
  uint64_t started;
  {
    const absl::MutexLock lock(&mu_);
    said_ = true;
    started = started_;
  }
  failure_.SendToAll(PackBye(started));
  const Deadline patience = Clock::now() + kByes;
  bool over = false;
  // In turns, since a group that fails meanwhile says no more.
  while (!over && !failure_.failed() && Clock::now() < patience) {
    const absl::MutexLock lock(&mu_);
    over = mu_.AwaitWithTimeout(absl::Condition(this, &Farewell::AllHaveSaid), kTurn);
  }
}

}  // namespace thinwire
