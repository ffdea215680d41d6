#include "schedule/engine/standstill.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace thinwire {

Standstill::Standstill(std::chrono::milliseconds timeout)
    : timeout_(timeout), counts_(std::max(timeout / 4, std::chrono::milliseconds(500))) {}

void Standstill::Beat(Deadline now) {
  const absl::MutexLock lock(&mu_);
  if (last_.has_value() && now - *last_ >= counts_) {
    woke_ = now;
    stood_ = now - *last_;
  }
  last_ = now;
}

std::chrono::duration<double> Standstill::Lasted(Deadline now) const {
  const absl::MutexLock lock(&mu_);
  // Another thread may be awake before the one that beats.
  if (last_.has_value() && now - *last_ >= counts_) return now - *last_;
  if (woke_.has_value() && now - *woke_ < timeout_) return stood_;
  return {};
}

absl::Status Standstill::Explain(int rank, const absl::Status& reason, Deadline now) const {
  const bool gone = absl::IsUnavailable(reason);
  if (!gone && !absl::IsDeadlineExceeded(reason)) return reason;
  const std::chrono::duration<double> stood = Lasted(now);
  if (stood.count() == 0) return reason;
  const std::string consequence =
      gone ? "its peers have given it up; let it run, or raise the timeout"
           : absl::StrCat("so ", std::string(reason.message()));
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", rank, " itself was stopped for ", absl::StrFormat("%.1f", stood.count()),
      " s, by a signal, by a debugger or for want of a processor, and ", consequence));
}

}  // namespace thinwire
