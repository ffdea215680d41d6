// How a group fails: once, for one reason, on every rank, within the deadline.
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/group.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTick(20);           // of the watchdog
constexpr milliseconds kLate(100);          // then a raw tensor is reported after all
constexpr milliseconds kDiagnosis(300);     // for other ranks' overdue notes to come in
constexpr milliseconds kGrace(1500);        // for the leader to speak
constexpr milliseconds kBetterReason(250);  // for a peer's own words to overtake its closed socket
constexpr milliseconds kEchoes(250);        // for every peer to say that it has failed as well
constexpr milliseconds kLastWords(200);     // for the own reason to leave

}  // namespace

absl::Status Group::Explain(const std::string& name, const absl::Status& status) const {
  return absl::Status(status.code(),
                      absl::StrCat("rank ", rank_, ", tensor '", name, "': ", status.message()));
}

// The rest is the watchdog's, in EndAll.
void Group::Fail(absl::Status reason, Tell tell) {
  if (tell == Tell::kNobody) OnEchoes(size_ - 1);
  {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return;
    status_ = reason;
  }
  if (tell == Tell::kEveryone) {
    const ControlFrame frame = PackFailure(reason);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) transport_->SendControl(peer, frame).IgnoreError();
    }
  }
  changed_.notify_all();
  submitted_.notify_all();
  admitted_.notify_all();
}

// Every rank passes a failure on to every other, so a peer's own word is the echo.
void Group::OnEchoes(int peers) {
  {
    const std::lock_guard lock(mu_);
    echoes_ += peers;
  }
  changed_.notify_all();
}

// A caller that gets an error may end its process at once, and a process that ends takes along what
// it has not sent, and what its peers have not read. So callers hear of a failure last: when every
// peer has heard of it, or can't be heard any more.
void Group::EndAll() {
  absl::Status reason;
  {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, kEchoes, [this] { return echoes_ >= size_ - 1; });
    reason = status_;
  }
  transport_->Abort(std::move(reason));
  transport_->FlushControl(Clock::now() + kLastWords);
  {
    const std::lock_guard lock(mu_);
    told_ = true;
  }
  changed_.notify_all();
  announced_.Close();
  planned_.Close();
  raw_.Close();
  posts_.Close();
  CompleteAfterFailure();
}

// Before a failure is handed to a caller.
void Group::AwaitTold() {
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return status_.ok() || told_; });
}

// Ends what no thread is touching; lanes and waiting callers end the rest as they come back.
void Group::CompleteAfterFailure() {
  std::vector<WorkPtr> idle, raw;
  {
    const std::lock_guard lock(mu_);
    for (const auto& [id, work] : works_) {
      if (work->raw_begun) {
        raw.push_back(work);
      } else if (work->chunks_running == 0) {
        idle.push_back(work);
      }
    }
  }
  for (const WorkPtr& work : idle) Retire(work, Outcome::kFailed);
  for (const WorkPtr& work : raw) FinishRaw(work);
}

// A rank that fails says why and then closes its connections, and its peers may notice the latter
// first. So a lost connection waits a moment for a better reason.
void Group::FailFromTransport(absl::Status status, const std::string& name) {
  if (absl::IsUnavailable(status)) {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, kBetterReason, [this] { return !status_.ok(); });
  }
  Fail(absl::Status(status.code(), absl::StrCat("tensor '", name, "': ", status.message())),
       Tell::kEveryone);
}

void Group::WatchdogLoop() {
  std::unique_lock lock(mu_);
  while (!changed_.wait_for(lock, kTick, [this] { return !status_.ok(); })) {
    lock.unlock();
    const Clock::time_point now = Clock::now();
    ReportLate(now);
    if (absl::Status expired = Expired(now); !expired.ok())
      Fail(std::move(expired), Tell::kEveryone);
    lock.lock();
  }
  lock.unlock();
  EndAll();
}

// Tells the leader of raw tensors that take long, and of any tensor past its deadline.
void Group::ReportLate(Clock::time_point now) {
  std::vector<std::pair<FrameType, WorkPtr>> notes;
  {
    const std::lock_guard lock(mu_);
    for (const auto& [id, work] : works_) {
      if (now >= work->deadline && !work->overdue) {
        work->overdue = work->reported = true;
        work->overdue_since = now;
        notes.emplace_back(FrameType::kOverdue, work);
      } else if (now >= work->submitted + kLate && !work->reported) {
        work->reported = true;
        notes.emplace_back(FrameType::kReport, work);
      }
    }
  }
  for (const auto& [type, work] : notes) Submit(type, *work);
}

// What has waited long enough, as an error: the leader's diagnosis, or its silence.
absl::Status Group::Expired(Clock::time_point now) {
  uint64_t id = 0;
  {
    const std::lock_guard lock(mu_);
    for (const auto& [work_id, work] : works_) {
      if (work->overdue && now >= work->overdue_since + kGrace) {
        return absl::DeadlineExceededError(absl::StrCat(
            "tensor '", work->name, "' passed its deadline on rank ", rank_, ", and rank 0, which ",
            "orders the chunks, did not answer; look whether it is stopped or its link is down"));
      }
    }
    for (const auto& [overdue_id, since] : overdue_) {
      if (now >= since + kDiagnosis) id = overdue_id;
    }
  }
  if (id == 0) return absl::OkStatus();
  const std::lock_guard lock(order_mu_);
  return leader_.Diagnose(id);
}

}  // namespace thinwire
