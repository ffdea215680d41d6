// The control channel: reports to the leader, its announcements, and news of failure.
#include <chrono>
#include <optional>
#include <vector>

#include "schedule/group.h"

namespace thinwire {

void Group::Submit(FrameType type, const InFlight& work) {
  if (rank_ == 0) return OnReport(0, type, work.report);
  for (const ControlFrame& frame : PackReports(type, {work.report})) {
    if (absl::Status status = transport_->SendControl(0, frame); !status.ok()) {
      FailFromTransport(std::move(status), work.name);
    }
  }
}

void Group::OnReport(int rank, FrameType type, const Report& report) {
  absl::Status status;
  {
    const std::lock_guard lock(order_mu_);
    if (FinishedHere(report)) return;
    status = ReportLocked(rank, type, report);
  }
  if (type == FrameType::kOverdue) {
    const std::lock_guard lock(mu_);
    overdue_.try_emplace(report.id(), Clock::now());
  }
  if (!status.ok()) Fail(std::move(status), Tell::kEveryone);
}

// Under order_mu_.
absl::Status Group::ReportLocked(int rank, FrameType type, const Report& report) {
  absl::Status status = leader_.OnReport(rank, report);
  if (type == FrameType::kOverdue) leader_.OnOverdue(rank, report);
  RememberLocked(rank, report);
  AnnounceLocked();
  return status;
}

// A raw or planned tensor needs no report to finish, so a late one may come when the leader is done
// with it.
bool Group::FinishedHere(const Report& report) const {
  const std::lock_guard lock(mu_);
  const auto state = keys_.find(report.key);
  if (state == keys_.end() || report.call >= state->second.calls) return false;
  const auto work = works_.find(report.id());
  return work == works_.end() || work->second->chunks_left == 0;
}

// Under order_mu_, so that the frames leave, and the own lanes see them, in one order.
void Group::AnnounceLocked() {
  const std::vector<Announcement> order = leader_.Next();
  for (const ControlFrame& frame : PackAnnouncements(order)) {
    for (int peer = 1; peer < size_; ++peer) {
      // A failure here also ends the control loop's Receive, which reports it.
      transport_->SendControl(peer, frame).IgnoreError();
    }
  }
  for (const Announcement& announcement : order) announced_.Push(announcement);
}

void Group::OnFrame(const ControlMessage& message) {
  const std::optional<Parsed> parsed = ParseFrame(message.frame);
  if (!parsed.has_value()) {
    return Fail(absl::FailedPreconditionError("a peer sent a control frame of an unknown version"),
                Tell::kEveryone);
  }
  if (parsed->type == FrameType::kFail) {
    Fail(parsed->failure, Tell::kEveryone);
    return OnEchoes(1);
  }
  if (parsed->type == FrameType::kBye) return OnBye();
  if (parsed->type == FrameType::kPong) return OnPong(message.from);
  if (parsed->type == FrameType::kPing) {
    transport_->SendControl(message.from, PackSignal(FrameType::kPong)).IgnoreError();
  }
  if (parsed->type == FrameType::kPlan) OnPlan(parsed->planned);
  for (const Report& report : parsed->reports) OnReport(message.from, parsed->type, report);
  for (const Announcement& announcement : parsed->announcements) announced_.Push(announcement);
}

void Group::OnBye() {
  {
    const std::lock_guard lock(mu_);
    ++byes_;
  }
  changed_.notify_all();
}

// A rank may have all that it wants while its peers still exchange their last chunk, and a closed
// connection would look like a lost peer to them. So all close together.
void Group::SayBye() {
  constexpr std::chrono::seconds kPatience(2);  // a rank that stays must not keep us
  const ControlFrame bye = PackSignal(FrameType::kBye);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) transport_->SendControl(peer, bye).IgnoreError();
  }
  std::unique_lock lock(mu_);
  changed_.wait_for(lock, kPatience, [this] { return byes_ == size_ - 1 || !status_.ok(); });
}

void Group::ControlLoop() {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = transport_->ReceiveControl();
    if (!message.ok()) {
      Fail(message.status(), Tell::kEveryone);
      return OnEchoes(size_ - 1);  // nobody is heard from here on
    }
    OnFrame(*message);
  }
}

}  // namespace thinwire
