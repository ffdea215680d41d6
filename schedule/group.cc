#include "schedule/group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compress/codec_list.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

std::vector<Segment> SegmentsOf(const AllReduceRequest& request) {
  const size_t numel = request.input.numel;
  if (request.segments.empty()) {
    return {{.name = std::string(request.key), .offset = 0, .count = numel, .total = numel}};
  }
  return {request.segments.begin(), request.segments.end()};
}

uint64_t LayoutHash(const std::vector<Segment>& segments) {
  uint64_t hash = segments.size();
  for (const Segment& segment : segments) {
    hash = HashCombine(HashCombine(hash, segment.count), segment.codec);
  }
  return hash;
}

}  // namespace

// Sparse entries go to everybody, so above a density of 1/4 over the ranks a dense int4, which goes
// to owners and back, is fewer bytes: 4 k (n - 1) against about 2 N (n - 1) / n * 4.06 / 8.
Options Group::Settle(Options options, int size) {
  for (CodecPair& codec : options.codecs) {
    const bool sparse = InfoOf(codec.up.id).kind == CodecKind::kEntries;
    if (sparse && uint64_t{codec.up.density_ppm} * size > 250000) {
      codec = *CodecPair::Parse("int4");
    }
  }
  return options;
}

absl::StatusOr<Group::Lanes> Group::MakeLanes(const Options& options, Transport& transport,
                                              Device* device) {
  Lanes lanes;
  for (int slot = 0; slot <= options.lanes; ++slot) {
    absl::StatusOr<std::unique_ptr<Lane>> lane =
        Lane::Make(device, transport, slot, options.timeout);
    if (!lane.ok()) return lane.status();
    lanes.push_back(*std::move(lane));
  }
  return lanes;
}

Group::Group(const Options& options, std::unique_ptr<Transport> transport,
             std::shared_ptr<Device> device, Lanes lanes)
    : options_(options),
      transport_(std::move(transport)),
      device_(std::move(device)),
      lanes_(std::move(lanes)),
      raw_lane_(*lanes_.back()),
      rank_(transport_->rank()),
      size_(transport_->size()),
      leader_(size_, options.policy, options.chunk_bytes * options.lanes),
      foresight_(options.policy),
      pings_(size_),
      foretells_(options.foresee == Foresee::kAlways),
      feedback_(device_, lanes_.size() + kPlanLanes) {
  if (!options.trace_path.empty()) {
    trace_ = std::make_unique<Trace>(options.trace_path, rank_, options.lanes + 1 + kPlanLanes);
  }
  for (int lane = 0; lane < options.lanes; ++lane) {
    threads_.emplace_back([this, lane] { LaneLoop(lane); });
  }
  threads_.emplace_back([this] { ControlLoop(); });
  threads_.emplace_back([this] { RawLoop(); });
  if (device_ != nullptr) threads_.emplace_back([this] { PostLoop(); });
  threads_.emplace_back([this] { WatchdogLoop(); });
  MeasureLatency();
}

Group::~Group() {
  bool orderly;
  {
    const std::lock_guard lock(mu_);
    orderly = works_.empty() && status_.ok();
  }
  if (orderly) SayBye();
  Fail(absl::CancelledError(absl::StrCat("rank ", rank_, " destroyed its communicator")),
       orderly ? Tell::kNobody : Tell::kEveryone);
  for (std::thread& thread : threads_) thread.join();
  for (std::thread& thread : plan_threads_) thread.join();
  if (trace_ != nullptr) trace_->Write().IgnoreError();  // there is nobody left to tell
}

absl::StatusOr<std::shared_ptr<Work>> Group::AllReduce(const AllReduceRequest& request) {
  // On rank 0 a planned chunk may be done as soon as it is registered, and must be in the book
  // then.
  std::unique_lock order(order_mu_, std::defer_lock);
  if (rank_ == 0) order.lock();
  const absl::StatusOr<WorkPtr> registered = Register(request);
  if (!registered.ok()) {
    if (rank_ == 0) order.unlock();
    AwaitTold();
    return registered.status();
  }
  const WorkPtr& work = *registered;
  absl::Status status;
  if (rank_ == 0) {
    if (work->report.raw == 0) status = ReportLocked(0, FrameType::kReport, work->report);
    order.unlock();
  } else if (work->report.raw == 0) {
    Submit(FrameType::kReport, *work);
  }
  if (!status.ok()) Fail(std::move(status), Tell::kEveryone);
  if (work->report.raw != 0) StartRaw(work, request.caller_waits);
  return work;
}

absl::StatusOr<Group::WorkPtr> Group::Register(const AllReduceRequest& request) {
  auto work = std::make_shared<InFlight>();
  work->key = std::string(request.key);
  work->input = request.input;
  work->output = request.output;
  work->device = device_;
  work->stream = request.stream;
  if (device_ != nullptr) {
    const std::unique_ptr<DeviceStream> caller = device_->Adopt(request.stream);
    work->order.ready = caller->Record();
    if (absl::Status status = caller->status(); !status.ok()) return Explain(work->key, status);
  }
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
  submitted_.notify_all();
  Count(*work);
  return work;
}

// Names the work, and finds its plan and what is kept of it.
absl::Status Group::PrepareLocked(const AllReduceRequest& request, InFlight* work) {
  const uint64_t key = HashBytes(work->key);
  const auto [found, fresh] = keys_.try_emplace(key);
  KeyState& state = found->second;
  if (fresh) state.step = first_step_;
  const bool named = !work->key.empty(), raw = GoesRaw(request.input);
  if (named && state.in_flight) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank_, ", tensor '", work->key,
                     "' is already being reduced; wait for that call first, or use another name"));
  }
  work->name = named ? work->key : absl::StrCat("unnamed call ", state.calls);
  const std::vector<Segment> segments = SegmentsOf(request);
  PlanLocked(segments, &state);
  if (named && NeedsMemory(segments, raw)) {
    BucketLayout layout;
    layout.segments = raw ? segments : state.plan->segments;
    if (!raw) layout.owned = state.plan->OwnedBy(rank_);
    layout.second_hop_weight = request.op == Op::kMean ? static_cast<float>(size_) : 1.0f;
    layout.momentum = options_.momentum.beta != 0.0f;
    absl::StatusOr<BucketMemory> memory = feedback_.Bind(work->key, layout);
    if (absl::IsFailedPrecondition(memory.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank_, ", tensor '", work->key,
                       "' has elements of a parameter that another tensor in flight has as well; ",
                       "wait for that one first"));
    }
    if (!memory.ok()) return Explain(work->key, memory.status());
    work->memory = *std::move(memory);
    work->order.fence = work->memory.fence;
  }
  if (device_ != nullptr && work->order.fence == nullptr) {
    work->order.fence = std::make_shared<Fence>(lanes_.size() + kPlanLanes);
  }
  work->report.key = key;
  work->report.call = state.calls++;
  work->step = state.step++;
  work->plan = state.plan;
  work->thresholds = state.thresholds;
  work->absent = PlacesOf(request.absent, segments);
  state.in_flight = named;
  return absl::OkStatus();
}

void Group::PlanLocked(const std::vector<Segment>& segments, KeyState* state) const {
  const uint64_t layout = LayoutHash(segments);
  if (state->plan != nullptr && state->layout == layout) return;
  state->layout = layout;
  state->plan = std::make_shared<const Plan>(MakePlan(segments, size_, options_));
  state->thresholds = std::make_shared<uint32_t[]>(state->plan->chunks.size());
}

bool Group::NeedsMemory(const std::vector<Segment>& segments, bool raw) const {
  if (options_.momentum.beta != 0.0f) return true;
  return !raw && std::any_of(segments.begin(), segments.end(), [this](const Segment& segment) {
    return options_.codecs[segment.codec].uses_feedback();
  });
}

// A raw tensor costs (n - 1) times its bytes, sent by everybody at once.
bool Group::GoesRaw(const TensorView& input) const {
  return input.bytes() * (size_ - 1) <= options_.min_bytes;
}

void Group::Count(const InFlight& work) {
  ++all_reduces_;
  raw_bytes_ += 2 * (size_ - 1) * work.input.numel * sizeof(float) / size_;
}

// On a device the caller must not wait until the tensor has come to the host.
void Group::StartRaw(const WorkPtr& work, bool caller_waits) {
  if (device_ != nullptr) return posts_.Push(work);
  if (caller_waits)
    work->finish_raw = [this, weak = std::weak_ptr(work)] {
      if (const WorkPtr alive = weak.lock()) FinishRaw(alive);
    };
  PostRaw(work);
}

void Group::PostRaw(const WorkPtr& work) {
  {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return;  // whoever failed the group ends what was not begun
    work->raw_begun = true;
    if (!raw_buffers_.empty()) {
      work->buffers = std::move(raw_buffers_.back());
      raw_buffers_.pop_back();
    }
  }
  const Backend& backend = raw_lane_.backend();
  if (work->buffers == nullptr) work->buffers = std::make_unique<LaneBuffers>(device_.get());
  LaneBuffers& buffers = *work->buffers;
  buffers.Reset();
  raw_lane_.Enter(work->order);
  TensorView input = work->input;
  if (work->memory.momentum != nullptr) {
    const std::span<float> m(work->memory.momentum.get(), input.numel);
    work->momentum.emplace(
        options_.momentum, m,
        buffers.TakeOf<float>(MomentumStep::ScratchFloats(options_.momentum, input.numel)));
    if (buffers.status().ok()) work->momentum->Before(backend, input, 0);
    input = {m.data(), m.size()};
  }
  auto exchange =
      std::make_unique<RawExchange>(work->id(), input, backend, raw_lane_.transport(), buffers);
  bool failed;
  {
    const std::lock_guard lock(mu_);
    work->raw = std::move(exchange);
    failed = !status_.ok();
  }
  if (failed) {
    FinishRaw(work);  // Fail came before it could see the exchange
  } else if (!work->finish_raw) {
    raw_.Push(work);
  }
}

void Group::FinishRaw(const WorkPtr& work) {
  {
    const std::lock_guard lock(mu_);
    if (work->raw == nullptr || std::exchange(work->raw_claimed, true)) return;
  }
  // The watchdog ends it long before the transport's own deadline would.
  TensorView output = work->output;
  if (work->momentum.has_value()) output = {work->memory.momentum.get(), output.numel};
  absl::Status status = work->raw->Finish(output, work->scale, work->deadline + options_.timeout);
  if (status.ok() && work->momentum.has_value()) {
    work->momentum->After(raw_lane_.backend(), work->output, 0);
  }
  status = raw_lane_.Leave(work->order, std::move(status));
  totals_.Add(Stage::kExchange, Clock::now() - work->submitted);
  const Outcome outcome = status.ok() ? Outcome::kDone : Outcome::kFailed;
  if (status.ok()) {
    const std::lock_guard lock(mu_);
    raw_buffers_.push_back(std::move(work->buffers));
  } else {
    FailFromTransport(std::move(status), work->name);
  }
  Retire(work, outcome);
}

// Ends a work that no thread touches any more. One that is not done failed with the group.
void Group::Retire(const WorkPtr& work, Outcome outcome) {
  if (outcome == Outcome::kFailed) AwaitTold();
  absl::Status status;
  {
    const std::lock_guard lock(mu_);
    if (works_.erase(work->id()) == 0) return;
    keys_[work->report.key].in_flight = false;
    work->memory = {};
    if (outcome == Outcome::kFailed) status = Explain(work->name, status_);
  }
  if (rank_ == 0 && work->report.raw != 0) {
    const std::lock_guard lock(order_mu_);
    leader_.Forget(work->id());
  }
  work->Complete(std::move(status));
}

void Group::SetStep(uint64_t step) {
  const std::lock_guard lock(mu_);
  first_step_ = step;
  for (auto& [key, state] : keys_) state.step = step;
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
  stats.planned_chunks = planned_chunks_;
  for (int stage = 0; stage < kStages; ++stage) stats.seconds[stage] = totals_.seconds(stage);
  return stats;
}

}  // namespace thinwire
