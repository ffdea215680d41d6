// Announcements ahead of time: foresight.h says which, and planned lanes hold each until this rank
// has submitted it. All ranks start planned chunks in one order, and announced ones in one order on
// lanes of their own; so the oldest of either has a lane everywhere, and finishes.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/group.h"

namespace thinwire {
namespace {

constexpr int kProbes = 5;  // of a peer's latency; the least counts

double Seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

}  // namespace

// Rank 0 asks each peer in turn. Answers come to OnPong.
void Group::MeasureLatency() {
  if (rank_ != 0 || options_.foresee != Foresee::kWhenFar) return;
  const std::lock_guard lock(order_mu_);
  for (int peer = 1; peer < size_; ++peer) SendPing(peer);
}

void Group::SendPing(int peer) {
  pings_[peer].sent = Clock::now();
  transport_->SendControl(peer, PackSignal(FrameType::kPing)).IgnoreError();
}

void Group::OnPong(int peer) {
  const std::lock_guard lock(order_mu_);
  Ping& ping = pings_[peer];
  ping.least = std::min(ping.least, Clock::now() - ping.sent);
  if (++ping.answers < kProbes) return SendPing(peer);
  if (++peers_measured_ < size_ - 1) return;
  Clock::duration farthest{};
  for (int r = 1; r < size_; ++r) farthest = std::max(farthest, pings_[r].least / 2);
  latency_s_ = std::chrono::duration<double>(farthest).count();
  far_ = farthest > options_.far;
}

void Group::EndStep() {
  if (rank_ != 0) return;
  const std::lock_guard lock(order_mu_);
  foresight_.EndStep(Seconds(Clock::now()));
  // While an announcement travels there and its end back, the link must have other chunks.
  const double on_their_way = 2.0 * latency_s_ * foresight_.bytes_per_s();
  leader_.SetWindow(options_.chunk_bytes * options_.lanes + static_cast<size_t>(on_their_way));
  PlanLocked();
}

// Under order_mu_: rank 0 has reported, or somebody else, or a tensor is done.
void Group::RememberLocked(int rank, const Report& report) {
  const double now = Seconds(Clock::now());
  if (rank == 0) foresight_.OnSubmitted(report, now);
  if (leader_.AllHave(report.id())) foresight_.OnReady(report.id(), now);
  PlanLocked();
}

void Group::ForgetLocked(uint64_t id) {
  foresight_.OnDone(id, Seconds(Clock::now()));
  PlanLocked();
}

void Group::PlanLocked() {
  const Foresight::Plan plan = foresight_.Next();
  if (plan.chunks.empty() || !(far_ || options_.foresee == Foresee::kAlways)) return;
  for (const Report& tensor : plan.tensors) leader_.Expect(tensor);
  for (const ControlFrame& frame : PackPlan(plan.chunks)) {
    for (int peer = 1; peer < size_; ++peer) transport_->SendControl(peer, frame).IgnoreError();
  }
  OnPlan(plan.chunks);
}

void Group::OnPlan(const std::vector<PlannedChunk>& chunks) {
  for (const PlannedChunk& chunk : chunks) planned_.Push(chunk);
  const std::lock_guard lock(mu_);
  if (!plan_threads_.empty() || !status_.ok()) return;
  for (int lane = 0; lane < kPlanLanes; ++lane) {
    plan_threads_.emplace_back([this, lane] { PlanLoop(options_.lanes + 1 + lane); });
  }
}

void Group::PlanLoop(int number) {
  absl::StatusOr<std::unique_ptr<Lane>> lane =
      Lane::Make(device_.get(), *transport_, number, options_.timeout);
  if (!lane.ok()) return Fail(lane.status(), Tell::kEveryone);
  while (const std::optional<PlannedChunk> chunk = planned_.Pop()) {
    if (!AwaitSubmission(*chunk)) continue;
    ++planned_chunks_;
    RunChunk(**lane, number, {chunk->id, chunk->chunk, 0});
  }
}

// Nobody has compared this rank's tensor with the others' yet; the plan's hash does.
bool Group::AwaitSubmission(const PlannedChunk& chunk) {
  WorkPtr work;
  {
    std::unique_lock lock(mu_);
    submitted_.wait(lock, [&] { return !status_.ok() || works_.contains(chunk.id); });
    if (!status_.ok()) return false;
    work = works_.at(chunk.id);
  }
  if (work->report.plan_hash == chunk.plan_hash && work->report.raw == 0) return true;
  Fail(absl::FailedPreconditionError(
           absl::StrCat("tensor '", work->name, "' has ", work->report.numel, " elements on rank ",
                        rank_, ", which are not those that rank 0 had in the step before; call ",
                        "with the same tensors in every step that end_step() ends")),
       Tell::kEveryone);
  return false;
}

}  // namespace thinwire
