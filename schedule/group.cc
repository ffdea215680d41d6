#include "schedule/group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"

namespace thinwire {

Group::Group(const Options& options, std::unique_ptr<Transport> transport)
    : options_(options),
      transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      backend_(CpuBackend()),
      leader_(size_, options.policy, options.chunk_bytes * options.lanes) {
  if (!options.trace_path.empty()) {
    trace_ = std::make_unique<Trace>(options.trace_path, rank_, options.lanes);
  }
  for (int lane = 0; lane < options.lanes; ++lane) {
    threads_.emplace_back([this, lane] { LaneLoop(lane); });
  }
  threads_.emplace_back([this] { ControlLoop(); });
  threads_.emplace_back([this] { RawLoop(); });
  threads_.emplace_back([this] { WatchdogLoop(); });
}

Group::~Group() {
  bool orderly;
  {
    const std::lock_guard lock(mu_);
    orderly = works_.empty() && status_.ok();
  }
  if (orderly) SayBye();
  {
    const std::lock_guard lock(mu_);
    closing_ = true;
  }
  changed_.notify_all();
  Fail(absl::CancelledError(absl::StrCat("rank ", rank_, " destroyed its communicator")),
       orderly ? Tell::kNobody : Tell::kEveryone);
  for (std::thread& thread : threads_) thread.join();
  if (trace_ != nullptr) trace_->Write().IgnoreError();  // there is nobody left to tell
}

absl::StatusOr<std::shared_ptr<Work>> Group::AllReduce(const AllReduceRequest& request) {
  const absl::StatusOr<WorkPtr> registered = Register(request);
  if (!registered.ok()) return registered.status();
  const WorkPtr& work = *registered;
  if (work->report.raw != 0) {
    StartRaw(work, request.caller_waits);
  } else {
    Submit(FrameType::kReport, *work);
  }
  return work;
}

absl::StatusOr<Group::WorkPtr> Group::Register(const AllReduceRequest& request) {
  auto work = std::make_shared<InFlight>();
  work->key = std::string(request.key);
  work->input = request.input;
  work->output = request.output;
  work->scale = request.op == Op::kMean ? 1.0f / static_cast<float>(size_) : 1.0f;
  work->submitted = Clock::now();
  work->deadline = work->submitted + options_.timeout;
  const bool raw = GoesRaw(request.input);

  const std::lock_guard lock(mu_);
  if (!status_.ok()) return Explain(work->key, status_);
  if (absl::Status status = PrepareLocked(request, work.get()); !status.ok()) return status;
  Report& report = work->report;
  SetName(work->name, &report);
  report.numel = request.input.numel;
  report.plan_hash = work->plan->Hash();
  report.priority = request.priority;
  report.dtype = static_cast<uint8_t>(request.input.dtype);
  report.op = static_cast<uint8_t>(request.op);
  report.raw = raw ? 1 : 0;
  report.chunks = static_cast<uint32_t>(work->plan->chunks.size());
  work->chunks_left = report.chunks;
  work->reported = !raw;
  works_[work->id()] = work;
  Count(*work);
  return work;
}

// Names the work, and finds its plan and its residuals.
absl::Status Group::PrepareLocked(const AllReduceRequest& request, InFlight* work) {
  const uint64_t key = HashBytes(work->key);
  KeyState& state = keys_[key];
  const bool named = !work->key.empty();
  if (named && state.in_flight) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank_, ", tensor '", work->key,
                     "' is already being reduced; wait for that call first, or use another name"));
  }
  work->name = named ? work->key : absl::StrCat("unnamed call ", state.calls);
  work->report.key = key;
  work->report.call = state.calls++;
  state.in_flight = named;
  if (state.plan == nullptr || state.numel != request.input.numel) {
    state.numel = request.input.numel;
    state.plan = std::make_shared<const Plan>(MakePlan(state.numel, size_, options_));
  }
  work->plan = state.plan;
  const bool quantised = options_.codec.id == CodecId::kInt8 || options_.codec.id == CodecId::kInt4;
  if (!named || !quantised || GoesRaw(request.input)) return absl::OkStatus();
  BucketLayout layout;
  layout.segments.assign(request.segments.begin(), request.segments.end());
  if (layout.segments.empty()) layout.segments.push_back({work->key, 0, state.numel, state.numel});
  layout.owned = state.plan->OwnedBy(rank_);
  layout.second_hop_weight = request.op == Op::kMean ? static_cast<float>(size_) : 1.0f;
  work->residual = feedback_.Bind(work->key, layout);
  if (work->residual != nullptr) return absl::OkStatus();
  state.in_flight = false;
  --state.calls;
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank_, ", tensor '", work->key,
                   "' has elements of a parameter that another tensor in flight has as well; ",
                   "wait for that one first"));
}

// A raw tensor costs (n - 1) times its bytes, sent by everybody at once.
bool Group::GoesRaw(const TensorView& input) const {
  return input.bytes() * (size_ - 1) <= options_.min_bytes;
}

void Group::Count(const InFlight& work) {
  ++all_reduces_;
  raw_bytes_ += 2 * (size_ - 1) * work.input.numel * sizeof(float) / size_;
}

void Group::StartRaw(const WorkPtr& work, bool caller_waits) {
  auto exchange = std::make_unique<RawExchange>(work->id(), work->input, backend_, *transport_);
  bool failed;
  {
    const std::lock_guard lock(mu_);
    work->raw = std::move(exchange);
    failed = !status_.ok();
  }
  if (caller_waits)
    work->finish_raw = [this, weak = std::weak_ptr(work)] {
      if (const WorkPtr alive = weak.lock()) FinishRaw(alive);
    };
  if (failed) {
    FinishRaw(work);  // Fail came before it could see the exchange
  } else if (!caller_waits) {
    raw_.Push(work);
  }
}

void Group::FinishRaw(const WorkPtr& work) {
  {
    const std::lock_guard lock(mu_);
    if (work->raw == nullptr || std::exchange(work->raw_claimed, true)) return;
  }
  // The watchdog ends it long before the transport's own deadline would.
  absl::Status status =
      work->raw->Finish(work->output, work->scale, work->deadline + options_.timeout);
  totals_.Add(Stage::kExchange, Clock::now() - work->submitted);
  const Outcome outcome = status.ok() ? Outcome::kDone : Outcome::kFailed;
  if (!status.ok()) FailFromTransport(std::move(status), work->name);
  Retire(work, outcome);
}

// Ends a work that no thread touches any more. One that is not done failed with the group.
void Group::Retire(const WorkPtr& work, Outcome outcome) {
  absl::Status status;
  {
    const std::lock_guard lock(mu_);
    if (works_.erase(work->id()) == 0) return;
    keys_[work->report.key].in_flight = false;
    work->residual.reset();
    if (outcome == Outcome::kFailed) status = Explain(work->name, status_);
  }
  if (rank_ == 0 && work->report.raw != 0) {
    const std::lock_guard lock(order_mu_);
    leader_.Forget(work->id());
  }
  work->Complete(std::move(status));
}

absl::Status Group::status() const {
  const std::lock_guard lock(mu_);
  return status_;
}

Stats Group::stats() const {
  Stats stats;
  stats.all_reduces = all_reduces_;
  stats.raw_bytes = raw_bytes_;
  stats.wire_bytes = transport_->bytes_sent();
  for (int stage = 0; stage < kStages; ++stage) stats.seconds[stage] = totals_.seconds(stage);
  return stats;
}

}  // namespace thinwire
