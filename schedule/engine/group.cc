#include "schedule/engine/group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/collective/direct.h"
#include "schedule/collective/grid.h"
#include "schedule/engine/checks.h"
#include "schedule/engine/issuer_executor.h"
#include "schedule/engine/thread_executor.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

Membership MembersOf(const Transport& transport) {
  return transport.empty() ? Membership() : transport.members();
}

DataTraits TraitsOf(const Transport& transport) {
  return transport.empty() ? DataTraits() : transport.data->traits();
}

}  // namespace

Group::Group(const Options& options, Transport transport, std::shared_ptr<Device> device)
    : options_(options),
      transport_(std::move(transport)),
      device_(std::move(device)),
      members_(MembersOf(transport_)),
      matching_(TraitsOf(transport_).matching),
      slots_(options.lanes + 1 + options.predicted_lanes),
      recorder_(DescribeWay(members_.size, options)),
      sent_before_(transport_.empty() ? 0 : transport_.data->bytes_sent()),
      pulse_(options.timeout),
      failure_(members_, options, transport_, pulse_, recorder_),
      farewell_(members_, options.timeout, transport_.control.get(), failure_),
      replicas_(members_, options.check_replicas, transport_.control.get(), failure_),
      works_(options_, members_, matching_, device_, slots_),
      chunk_spaces_(device_.get(), transport_.data.get()),
      direct_spaces_(device_.get(), transport_.data.get()),
      local_path_(options_, direct_spaces_) {
  if (!options.trace_path.empty() && !transport_.empty()) {
    trace_ = std::make_unique<Trace>(options.trace_path, members_.rank);
  }
}

absl::Status Group::StartThreads() {
  if (transport_.empty()) return absl::OkStatus();
  if (absl::Status status = MakeExecutor(); !status.ok()) return status;
  if (absl::Status status = MakeDirectPath(); !status.ok()) return status;
  sequencing_ = std::make_unique<Sequencing>(members_, options_, matching_, *transport_.control,
                                             *executor_, failure_, recorder_);
  reader_ = std::make_unique<ControlReader>(*transport_.control, *sequencing_, failure_, farewell_,
                                            replicas_, recorder_);
  watchdog_ = std::make_unique<Watchdog>(
      failure_, pulse_, [this] { sequencing_->OnClock(); }, [this] { EndAll(); });
  sequencing_->Begin();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Lane>> Group::MakeLane(Workspaces& spaces, int slot) {
  return Lane::Make(device_.get(), spaces, *transport_.data, slot, options_.timeout);
}

// Slots in fences and traces: the announced chunks' lanes, the direct path's, the predicted
// chunks'.
absl::Status Group::MakeExecutor() {
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int slot = 0; slot < options_.lanes; ++slot) {
    absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane(chunk_spaces_, slot);
    if (!lane.ok()) return lane.status();
    lanes.push_back(*std::move(lane));
  }
  const LaneMaker more = [this](int number) { return MakeLane(chunk_spaces_, number + 1); };
  const Instruments instruments{totals_, trace_.get(), recorder_};
  if (transport_.data->traits().completion == Completion::kEvents) {
    executor_ = std::make_unique<IssuerExecutor>(std::move(lanes), more, matching_, options_,
                                                 instruments, *this, failure_);
  } else {
    executor_ = std::make_unique<ThreadExecutor>(std::move(lanes), more, slots_ - 1, options_,
                                                 instruments, *this, failure_);
  }
  return absl::OkStatus();
}

// Over a plane that matches by order, small tensors go in order as well. Rows of a trace: behind
// those of the slots.
absl::Status Group::MakeDirectPath() {
  if (matching_ != Matching::kByTag) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane(direct_spaces_, options_.lanes);
  if (!lane.ok()) return lane.status();
  direct_path_ =
      std::make_unique<DirectPath>(*std::move(lane), device_ != nullptr, slots_, options_,
                                   Instruments{totals_, trace_.get(), recorder_}, *this);
  return absl::OkStatus();
}

Group::~Group() {
  if (sequencing_ == nullptr) return;  // no thread was started
  const bool orderly = works_.idle() && !failure_.failed();
  if (orderly) farewell_.Say();
  failure_.Fail(
      absl::CancelledError(absl::StrCat("rank ", members_.rank, " destroyed its communicator")),
      orderly ? Tell::kNobody : Tell::kEveryone);
  watchdog_.reset();
  reader_.reset();
  executor_.reset();
  direct_path_.reset();
  if (trace_ != nullptr) trace_->Write().IgnoreError();  // there is nobody left to tell
}

absl::StatusOr<std::shared_ptr<const Bucket>> Group::Register(const BucketRequest& request) {
  if (absl::Status bad = CheckBucket(request, members_, options_); !bad.ok()) return bad;
  const auto [bucket, is_new] = works_.Register(request);
  if (device_ == nullptr || !is_new || !bucket->named()) return bucket;
  absl::Status status = Reserve(*bucket);
  if (status.ok()) return bucket;
  if (bucket->route() == Route::kLocal) return OfTensor(bucket->key(), status);
  failure_.FailFromExchange(status, bucket->key());
  return Refusal(*bucket, status);
}

// So that no step asks the device for memory. Announced chunks run on `lanes` lanes, and a tensor
// that goes at once is in flight once.
absl::Status Group::Reserve(const Bucket& bucket) {
  const bool over_pinned = TraitsOf(transport_).memory == Memory::kHost;
  if (bucket.route() != Route::kOrdered) {
    return direct_spaces_.Reserve(bucket.report().key, bucket.needs(), over_pinned);
  }
  for (int lane = 0; lane < options_.lanes; ++lane) {
    absl::Status status = chunk_spaces_.Reserve(lane, bucket.needs(), over_pinned);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Work>> Group::Submit(const std::shared_ptr<const Bucket>& bucket,
                                                    const Submission& submission) {
  if (absl::Status bad = CheckSubmission(submission, *bucket, members_, device_.get()); !bad.ok()) {
    return bad;
  }
  if (failure_.failed()) return Refusal(*bucket, failure_.status());
  const absl::StatusOr<WorkPtr> begun = works_.Begin(bucket, submission);
  if (!begun.ok()) return Refusal(*bucket, begun.status());
  const WorkPtr& work = *begun;
  Count(*work);
  recorder_.Record(FlightEvent::kSubmitted, work->label, 0, 0, work->report.numel);
  if (bucket->route() == Route::kLocal) {
    if (absl::Status failed = RunLocal(work); !failed.ok()) return failed;
    return work;
  }
  sequencing_->OnSubmit(work->report);
  if (bucket->route() == Route::kDirect) direct_path_->Start(work, submission.caller_waits);
  return work;
}

// A call that comes after a failure is told the first reason, once all ranks have heard it.
absl::Status Group::Refusal(const Bucket& bucket, const absl::Status& status) const {
  if (!failure_.failed()) return status;
  failure_.AwaitTold();
  return failure_.Explain(bucket.key(), failure_.status());
}

absl::Status Group::RunLocal(const WorkPtr& work) {
  absl::Status status = local_path_.Run(*work);
  if (!status.ok()) failure_.Fail(status, Tell::kNobody);
  Retire(work, status.ok() ? Outcome::kDone : Outcome::kFailed);
  return status;
}

void Group::Count(const InFlight& work) {
  farewell_.OnStarted(++collectives_);
  const size_t hops = work.bucket->collective() == Collective::kAllReduce ? 2 : 1;
  const size_t all = work.bucket->collective() == Collective::kAllGather ? members_.size : 1;
  raw_bytes_ += hops * all * (members_.size - 1) * work.input.numel * sizeof(float) / members_.size;
}

void Group::EndChunk(const StartChunk& start, const WorkPtr& work, absl::Status status) {
  const bool ok = status.ok();
  if (ok) {
    replicas_.OnChunk(*work, start.chunk);
  } else {
    failure_.FailFromExchange(status, work->label);
  }
  const Works::Left left = works_.EndChunk(*work, ok);
  if (ok && work->bucket->route() == Route::kDirect) {
    sequencing_->OnDirectDone(start.id);
  } else if (ok) {
    sequencing_->OnChunkDone(start, left == Works::Left::kDone);
  }
  if (left == Works::Left::kSome) return;
  if (left == Works::Left::kDone) replicas_.OnDone(*work);
  Retire(work, left == Works::Left::kDone ? Outcome::kDone : Outcome::kFailed);
}

// Ends a work that no thread touches any more. One that is not done failed with the group.
void Group::Retire(const WorkPtr& work, Outcome outcome) {
  if (outcome == Outcome::kFailed) failure_.AwaitTold();
  if (!works_.Remove(work)) return;
  recorder_.Record(FlightEvent::kTensorDone, work->label);
  if (outcome == Outcome::kFailed) {
    return work->Complete(failure_.Explain(work->label, failure_.status()));
  }
  work->Complete(absl::OkStatus());
  farewell_.OnFinished();
}

// The group has failed: all ranks hear of it, and what no thread is touching ends here. Lanes and
// waiting callers end the rest as they come back.
void Group::EndAll() {
  failure_.Spread();
  executor_->Close();
  if (direct_path_ != nullptr) direct_path_->Close();
  for (const WorkPtr& work : works_.Close(failure_.status())) Retire(work, Outcome::kFailed);
}

// Who fails its group may end its process next.
void Group::Abort(absl::Status reason) {
  failure_.Fail(std::move(reason), Tell::kEveryone);
  failure_.AwaitTold();
}

void Group::EndStep() {
  if (sequencing_ != nullptr) sequencing_->EndStep();
}

bool Group::GoesRaw(const TensorView& input) const {
  return thinwire::GoesRaw(input.bytes(), members_.size, options_);
}

Stats Group::stats() const {
  Stats stats;
  stats.all_reduces = collectives_;
  stats.raw_bytes = raw_bytes_;
  if (!transport_.empty()) stats.wire_bytes = transport_.data->bytes_sent() - sent_before_;
  if (sequencing_ != nullptr) stats.predicted_chunks = sequencing_->predicted_chunks();
  for (int stage = 0; stage < kStages; ++stage) stats.seconds[stage] = totals_.seconds(stage);
  return stats;
}

std::string Group::Describe() const {
  const absl::Status status = failure_.status();
  std::string text = absl::StrCat("rank ", members_.rank, " of ", members_.size, ": ",
                                  status.ok() ? "in order" : std::string(status.message()), "\n",
                                  works_.Describe());
  if (sequencing_ != nullptr) absl::StrAppend(&text, sequencing_->Describe());
  absl::StrAppend(&text, "last events:\n", recorder_.Text());
  return text;
}

}  // namespace thinwire
