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

constexpr int kProbes = 5;                    // of a peer's latency; the least counts
constexpr std::chrono::seconds kPatience(2);  // of all that; a rank may be slow to come

double Seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

}  // namespace

// Rank 0 asks every peer, before it takes part in anything: on a busy link an answer waits behind
// chunks. Answers come to OnPong.
void Group::MeasureLatency() {
  if (rank_ != 0) return;
  std::unique_lock lock(order_mu_);
  for (int peer = 1; peer < size_; ++peer) SendPing(peer);
  measured_.wait_for(lock, kPatience, [this] { return peers_measured_ == size_ - 1; });
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
  if (options_.foresee == Foresee::kWhenFar) foretells_ = farthest > options_.far;
  measured_.notify_all();
}

void Group::EndStep() {
  if (rank_ != 0) return;
  const std::lock_guard lock(order_mu_);
  foresight_.EndStep(Seconds(Clock::now()));
  leader_.SetWindow(WindowBytes(2));  // of an announcement there, and its end back
  PlanLocked();
}

// Bytes under way at once: a few chunks, and what else the link carries while `latencies` go by.
size_t Group::WindowBytes(int latencies) const {
  const double on_their_way = latencies * latency_s_ * foresight_.bytes_per_s();
  return options_.chunk_bytes * options_.lanes + static_cast<size_t>(on_their_way);
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
  Foresight::Plan plan = foresight_.Next();
  if (plan.chunks.empty() || !foretells_) return;
  for (const Report& tensor : plan.tensors) leader_.Expect(tensor);
  const auto window_kib = static_cast<uint32_t>(WindowBytes(kPlanLatencies * kHopLatencies) >> 10);
  for (PlannedChunk& chunk : plan.chunks) chunk.window_kib = window_kib;
  for (const ControlFrame& frame : PackPlan(plan.chunks)) {
    for (int peer = 1; peer < size_; ++peer) transport_->SendControl(peer, frame).IgnoreError();
  }
  OnPlan(plan.chunks);
}

void Group::OnPlan(const std::vector<PlannedChunk>& chunks) {
  for (const PlannedChunk& chunk : chunks) planned_.Push({chunk, next_place_++});
  const std::lock_guard lock(mu_);
  if (!chunks.empty()) window_.SetLimit(size_t{chunks.front().window_kib} << 10);
  if (!plan_threads_.empty() || !status_.ok()) return;
  for (int lane = 0; lane < kPlanLanes; ++lane) {
    plan_threads_.emplace_back([this, lane] { PlanLoop(options_.lanes + 1 + lane); });
  }
}

void Group::PlanLoop(int number) {
  absl::StatusOr<std::unique_ptr<Lane>> lane =
      Lane::Make(device_.get(), *transport_, number, options_.timeout);
  if (!lane.ok()) return Fail(lane.status(), Tell::kEveryone);
  while (const std::optional<Planned> planned = planned_.Pop()) {
    if (!AwaitTurn(*planned)) continue;  // failed meanwhile
    ++planned_chunks_;
    RunChunk(**lane, number, {planned->chunk.id, planned->chunk.chunk, 0});
    EndTurn(*planned);
  }
}

// Until this rank has submitted the chunk, and the window lets it start.
bool Group::AwaitTurn(const Planned& planned) {
  const auto& [chunk, place] = planned;
  WorkPtr work;
  {
    std::unique_lock lock(mu_);
    window_.Hold(place);
    submitted_.wait(lock, [&] { return !status_.ok() || works_.contains(chunk.id); });
    if (!status_.ok()) return false;
    work = works_.at(chunk.id);
  }
  if (!AsPlanned(*work, chunk)) return false;
  {
    std::unique_lock lock(mu_);
    window_.Ready(place, ChunkBytes(work->report));
    admitted_.wait(lock, [&] { return !status_.ok() || window_.MayStart(place); });
    if (!status_.ok()) return false;
    window_.Start(place);
  }
  admitted_.notify_all();  // there may be room for the next
  return true;
}

void Group::EndTurn(const Planned& planned) {
  {
    const std::lock_guard lock(mu_);
    window_.Finish(planned.place);
  }
  admitted_.notify_all();
}

// Nobody has compared this rank's tensor with the others' yet; the plan's hash does.
bool Group::AsPlanned(const InFlight& work, const PlannedChunk& chunk) {
  if (work.report.plan_hash == chunk.plan_hash && work.report.raw == 0) return true;
  Fail(absl::FailedPreconditionError(
           absl::StrCat("tensor '", work.name, "' has ", work.report.numel, " elements on rank ",
                        rank_, ", which are not those that rank 0 had in the step before; call ",
                        "with the same tensors in every step that end_step() ends")),
       Tell::kEveryone);
  return false;
}

}  // namespace thinwire
