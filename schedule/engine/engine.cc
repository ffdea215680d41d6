#include "schedule/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/collective/partition.h"
#include "schedule/engine/checks.h"
#include "transport/checked/checked.h"
#include "transport/threads.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

constexpr std::chrono::milliseconds kBeat(20);  // of the thread that keeps the time

// The wait for all ranks' latency takes at most this, and at most a quarter of the timeout: a rank
// may start late, and a rank that waits for a stopped one must still submit in time not to be late
// itself. The wait is in short turns, since peers stop answering when the group fails.
constexpr std::chrono::milliseconds kLatencyPatience(2000);
constexpr std::chrono::milliseconds kLook(1);  // for the peers' answers

// The sequencer's clock, in seconds.
double Now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

Membership MembersOf(const Transport& transport) {
  return transport.empty() ? Membership() : transport.members();
}

DataTraits TraitsOf(const Transport& transport) {
  return transport.empty() ? DataTraits() : transport.data->traits();
}

// A data plane of device memory supports neither host tensors nor checksums (made by the CPU).
absl::Status CheckMemory(const Options& options, const Transport& transport, const Device* device) {
  if (transport.empty() || transport.data->traits().memory == Memory::kHost) {
    return absl::OkStatus();
  }
  if (device == nullptr) {
    return absl::InvalidArgumentError(
        "this transport moves a device's memory, expected tensors on one, got tensors on the host; "
        "set transport to gloo, or the device");
  }
  if (options.checksum) {
    return absl::UnimplementedError(
        "checksum is on, but this transport moves a device's memory, which no processor sees; "
        "set transport to gloo, or checksum off");
  }
  return absl::OkStatus();
}

// All checks that need no engine.
absl::Status CheckParts(const Settled& settled, const Membership& members,
                        const Transport& transport, const Device* device) {
  if (absl::Status bad = CheckOptions(*settled); !bad.ok()) return bad;
  if (members.size != settled.world()) {
    return absl::InvalidArgumentError(absl::StrCat("options of a group of ", settled.world(),
                                                   " ranks with a transport of ", members.size,
                                                   "; settle the options for that many"));
  }
  if (members.size == 1) return absl::OkStatus();
  if (absl::Status bad = CheckMemory(*settled, transport, device); !bad.ok()) return bad;
  return device == nullptr ? absl::OkStatus() : CheckKernels(*settled, *device);
}

// Kernels read only memory of their device, aligned to whole elements.
absl::Status CheckHeld(const TensorView& view, const Device& device) {
  if (!device.Holds(view.data)) {
    return absl::InvalidArgumentError(absl::StrCat("its memory is not of ", device.name(),
                                                   ", expected a tensor on that device; move it"));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % SizeOf(view.dtype) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("its address is no multiple of the ",
                                                 SizeOf(view.dtype), " bytes of an element; ",
                                                 "align it, or copy it"));
}

// True if every output element is written only after the input element in the same memory was read:
// input and output do not overlap, or this rank's own elements have the same place in both.
bool MayShareMemory(const TensorView& in, const TensorView& out, Collective collective, int rank) {
  const auto *read = static_cast<const uint8_t*>(in.data),
             *written = static_cast<const uint8_t*>(out.data);
  if (read + in.bytes() <= written || written + out.bytes() <= read) return true;
  switch (collective) {
    case Collective::kAllReduce: return written == read;
    case Collective::kReduceScatter: return written == read + rank * out.bytes();
    case Collective::kAllGather: return read == written + rank * in.bytes();
    case Collective::kAllToAll: return false;
  }
  return false;
}

// `device` is null for the host.
absl::Status CheckSubmission(const Submission& submission, const Bucket& bucket,
                             const Membership& members, const Device* device) {
  const TensorView &in = submission.input, &out = submission.output;
  const Report& described = bucket.report();
  const size_t expected = bucket.output_numel();
  const auto bad = [&](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members.rank, ", tensor '", bucket.key(), "': ", parts...));
  };
  if (in.numel != described.numel || static_cast<uint8_t>(in.dtype) != described.dtype) {
    return bad("the input has ", in.numel, " elements of ", std::string(Name(in.dtype)),
               ", expected ", described.numel, " of ",
               std::string(Name(static_cast<DType>(described.dtype))),
               " as its bucket was registered with");
  }
  if (out.numel != expected || in.dtype != out.dtype) {
    return bad("the output has ", out.numel, " elements of ", std::string(Name(out.dtype)),
               ", expected ", expected, " of ", std::string(Name(in.dtype)), " as the input has");
  }
  if (in.numel > 0 && (in.data == nullptr || out.data == nullptr)) {
    return bad("got a null pointer for ", in.numel, " elements");
  }
  if (!MayShareMemory(in, out, bucket.collective(), members.rank)) {
    return bad("its output overlaps its input, expected memory apart, or, but in an all-to-all, ",
               "this rank's own elements in the same place of both");
  }
  for (const TensorView* view : {&in, &out}) {
    if (device == nullptr || in.numel == 0) break;
    if (absl::Status status = CheckHeld(*view, *device); !status.ok()) {
      return bad(std::string(status.message()));
    }
  }
  if (submission.divisor != 0.0f) {
    if (!std::isnormal(submission.divisor) || submission.divisor < 0.0f) {
      return bad("the divisor is ", submission.divisor, ", expected a finite number above 0, or 0 ",
                 "for the number of ranks");
    }
    if (described.op != static_cast<uint8_t>(Op::kMean) || !Reduces(bucket.collective())) {
      return bad("a divisor goes with the mean, got a sum, an all-gather or an all-to-all");
    }
    if (!bucket.layout().arrays.empty()) {
      return bad("a divisor of ", submission.divisor, " goes with a group without momentum, whose ",
                 "own part is a mean over all ranks; keep the momentum in the optimizer");
    }
  }
  if (submission.absent.empty()) return absl::OkStatus();
  if (bucket.collective() != Collective::kAllReduce) {
    return bad("absent segments go with an allreduce, got another collective");
  }
  for (const uint32_t number : submission.absent) {
    if (number < bucket.segments()) continue;
    return bad("segment ", number, " is absent, expected 0 to ", bucket.segments() - 1);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Settled& settled, Transport transport,
                                                       std::shared_ptr<Device> device) {
  const Membership members = MembersOf(transport);
  absl::Status bad = CheckParts(settled, members, transport, device.get());
  const auto of_rank = [&] {
    return absl::Status(bad.code(), absl::StrCat("rank ", members.rank, ": ", bad.message()));
  };
  if (!bad.ok()) {
    // Peers may have their engines already, and wait for this rank. Destroying the transport gives
    // frames sent before it a moment to leave.
    if (!transport.empty()) transport.control->SendToAll(PackFailure(of_rank()));
    return of_rank();
  }
  if (members.size == 1) transport.Reset();
  if (settled->checksum && members.size > 1) {
    transport.data = std::make_unique<Checked>(std::move(transport.data));
  }
  std::unique_ptr<Engine> engine(new Engine(*settled, std::move(transport), std::move(device)));
  bad = engine->StartThreads();
  if (bad.ok()) return engine;
  engine->failure_.Fail(of_rank(), Tell::kEveryone);
  return of_rank();
}

Engine::Engine(const Options& options, Transport transport, std::shared_ptr<Device> device)
    : options_(options),
      transport_(std::move(transport)),
      device_(std::move(device)),
      members_(MembersOf(transport_)),
      matching_(TraitsOf(transport_).matching),
      sent_before_(transport_.empty() ? 0 : transport_.data->bytes_sent()),
      records_(members_, options),
      failure_(members_, options, transport_, records_),
      farewell_(members_, options.timeout, transport_.control.get(), failure_),
      tensors_(options_, members_, matching_, device_,
               options.lanes + 1 + options.predicted_lanes),  // 1: for small tensors
      chunk_spaces_(device_.get(), transport_.data.get(), options.timeout),
      direct_spaces_(device_.get(), transport_.data.get(), options.timeout),
      sequencer_(members_, options, matching_, HopShares(members_.size, options)) {}

absl::Status Engine::StartThreads() {
  if (transport_.empty()) return absl::OkStatus();
  const auto on_end = [this](const StartChunk& start, absl::Status status) {
    OnChunkEnd(start, std::move(status));
  };
  const auto on_hop = [this](const StartChunk& start) {
    TellSequencer([&](Sequencer& s) { s.OnHopDone(start, Now()); });
  };
  executor_ =
      std::make_unique<Executor>(chunk_spaces_, direct_spaces_, options_, records_, on_hop, on_end);
  if (absl::Status status = executor_->Begin(); !status.ok()) return status;
  if (absl::Status status = chunk_spaces_.SetAtOnce(options_.lanes); !status.ok()) return status;
  absl::StatusOr<std::thread> timekeeper = StartThread([this] { KeepTime(); });
  if (!timekeeper.ok()) return timekeeper.status();
  timekeeper_ = *std::move(timekeeper);
  absl::StatusOr<std::thread> reader = StartThread([this] { ReadFrames(); });
  if (!reader.ok()) return reader.status();
  reader_ = *std::move(reader);
  MeasureLatency();
  return absl::OkStatus();
}

Engine::~Engine() {
  if (!timekeeper_.joinable()) return;  // a world of one has no threads
  const bool orderly = tensors_.idle() && !failure_.failed();
  if (orderly) farewell_.Say();
  failure_.Fail(
      absl::CancelledError(absl::StrCat("rank ", members_.rank, " destroyed its communicator")),
      orderly ? Tell::kNobody : Tell::kEveryone);
  timekeeper_.join();
  if (reader_.joinable()) reader_.join();  // else it could not start
  executor_.reset();
  records_.WriteTrace().IgnoreError();  // no caller is left to report it to
}

absl::StatusOr<std::shared_ptr<const Bucket>> Engine::Register(const BucketRequest& request) {
  if (absl::Status bad = CheckBucket(request, members_, options_); !bad.ok()) return bad;
  const auto [bucket, is_new] = tensors_.Register(request);
  if (device_ == nullptr || !is_new || !bucket->named()) return bucket;
  absl::Status status = Reserve(*bucket);
  if (status.ok()) return bucket;
  if (bucket->route() == Route::kLocal) return OfTensor(members_.rank, bucket->key(), status);
  failure_.FailFromExchange(status, bucket->key());
  return Refusal(*bucket, status);
}

// Reserves memory so that no step allocates device memory. Announced chunks run on `lanes` lanes;
// memory for predicted chunks is reserved when the prediction arrives. A tensor that goes at once
// is in flight at most once.
absl::Status Engine::Reserve(const Bucket& bucket) {
  if (bucket.route() != Route::kOrdered) {
    return direct_spaces_.Reserve(bucket.report().key, bucket.chunk_memory());
  }
  return chunk_spaces_.ReserveForAll(bucket.chunk_memory());
}

absl::StatusOr<UsePtr> Engine::Submit(const std::shared_ptr<const Bucket>& bucket,
                                      const Submission& submission) {
  if (absl::Status bad = CheckSubmission(submission, *bucket, members_, device_.get()); !bad.ok()) {
    return bad;
  }
  if (failure_.failed()) return Refusal(*bucket, failure_.status());
  const absl::StatusOr<UsePtr> begun = tensors_.Begin(bucket, submission);
  if (!begun.ok()) {
    // Bad input concerns only the caller; but if this rank's device fails, its peers would wait.
    if (!absl::IsInvalidArgument(begun.status())) {
      failure_.Fail(begun.status(), Tell::kEveryone);
    }
    return Refusal(*bucket, begun.status());
  }
  const UsePtr& use = *begun;
  Count(*use);
  if (bucket->route() == Route::kLocal) {
    if (absl::Status failed = RunLocal(*use); !failed.ok()) return failed;
    return use;
  }
  TellSequencer([&](Sequencer& s) { s.OnSubmit({use, &use->report}, Now(), use); });
  if (bucket->route() == Route::kDirect) executor_->StartDirect(use, submission.caller_waits);
  return use;
}

absl::StatusOr<UsePtr> Engine::Start(const CollectiveRequest& request) {
  if (request.input.numel == 0 && request.output.numel == 0) {
    const UsePtr nothing = std::make_shared<Use>();
    nothing->Complete(absl::OkStatus());
    return nothing;
  }
  const absl::StatusOr<std::shared_ptr<const Bucket>> bucket = Register(request.bucket());
  if (!bucket.ok()) return bucket.status();
  return Submit(*bucket, request.submission());
}

// A call after a failure returns the first reason, once all ranks have it.
absl::Status Engine::Refusal(const Bucket& bucket, const absl::Status& status) const {
  if (!failure_.failed()) return status;
  failure_.AwaitTold();
  return failure_.Explain(bucket.key(), failure_.status());
}

void Engine::Count(const Use& use) {
  const size_t hops = use.bucket->collective() == Collective::kAllReduce ? 2 : 1;
  const size_t all = use.bucket->collective() == Collective::kAllGather ? members_.size : 1;
  farewell_.OnStarted(records_.AddCollective(hops * all * (members_.size - 1) * use.input.numel *
                                             sizeof(float) / members_.size));
  records_.Event(FlightEvent::kSubmitted, use.label, 0, 0, use.report.numel);
}

// A world of one: on the caller's thread, and on a device on the caller's own stream.
absl::Status Engine::RunLocal(Use& use) {
  std::unique_ptr<DeviceStream> stream;  // null: the host
  if (device_ != nullptr) {
    stream = device_->Adopt(use.stream);
    use.fence->HoldBack(*stream);
  }
  std::unique_ptr<Workspace> space = direct_spaces_.Take(use.bucket->chunk_memory(), stream.get());
  const ChunkJob job = use.JobOf(0, options_);
  absl::Status status = job.chunk->algorithm->begin(job, *space)->Advance().status();
  const std::shared_ptr<DeviceEvent> end = stream == nullptr ? nullptr : stream->Record();
  if (end != nullptr) use.fence->Set(0, end);
  direct_spaces_.Give(std::move(space), end);
  if (status.ok() && stream != nullptr) status = stream->status();
  if (!status.ok()) failure_.Fail(status, Tell::kNobody);
  Retire(use, status.ok() ? Use::Left::kDone : Use::Left::kFailed);
  return status;
}

// Passes one event at a time to the sequencer, and carries out its outbox in order, with no lock
// held.
template <typename Event>
void Engine::TellSequencer(Event event) {
  {
    const absl::MutexLock lock(&mu_);
    event(sequencer_);
    if (carrying_ || sequencer_.outbox().empty()) return;
    carrying_ = true;
    std::swap(batch_, sequencer_.outbox());
  }
  for (bool more = true; more;) {
    for (const Action& action : batch_.actions()) CarryOut(action);
    batch_.Clear();
    const absl::MutexLock lock(&mu_);
    more = carrying_ = !sequencer_.outbox().empty();
    if (more) std::swap(batch_, sequencer_.outbox());
  }
}

void Engine::CarryOut(const Action& action) {
  if (failure_.failed()) return;
  switch (action.kind) {
    case Action::Kind::kStart:
      if (action.start.predicted) records_.AddPredicted();
      executor_->Start(action.start);
      break;
    case Action::Kind::kSend: Send(action.to, action.message); break;
    case Action::Kind::kPredicted:
      if (absl::Status status = chunk_spaces_.SetAtOnce(options_.lanes + action.at_once);
          !status.ok()) {
        failure_.Fail(std::move(status), Tell::kEveryone);
      }
      break;
    case Action::Kind::kFail: failure_.Fail(action.reason, Tell::kEveryone, action.silent); break;
  }
}

void Engine::Send(int to, const OrderMessage& message) {
  records_.Event(FlightEvent::kFrameOut, message.report.name, 0, to,
                 static_cast<uint64_t>(message.type));
  ForEachFrame(message, [&](const ControlFrame& frame) {
    for (int peer = 0; peer < members_.size; ++peer) {
      if (peer == members_.rank || (to != kEveryone && to != peer)) continue;
      // A failure here also ends the reader's Receive, which reports it.
      transport_.control->Send(peer, frame).IgnoreError();
    }
  });
}

// Rank 0 measures its peers' latency, and waits a limited time for their answers.
void Engine::MeasureLatency() {
  TellSequencer([](Sequencer& s) { s.Begin(Now()); });
  const Deadline patience = Clock::now() + std::min(kLatencyPatience, options_.timeout / 4);
  const auto measured = [this] {
    const absl::MutexLock lock(&mu_);
    return sequencer_.measured();
  };
  while (!measured() && Clock::now() < patience && !failure_.AwaitFailure(kLook)) continue;
}

void Engine::OnChunkEnd(const StartChunk& start, absl::Status status) {
  Use& use = UseOf(start);
  const bool ok = status.ok();
  if (!ok) failure_.FailFromExchange(status, use.label);
  const Use::Left left = use.EndChunk(ok);
  if (ok && use.bucket->route() == Route::kDirect) {
    TellSequencer([&](Sequencer& s) { s.OnDirectDone(start.id); });
  } else if (ok) {
    TellSequencer([&](Sequencer& s) { s.OnChunkDone(start, left == Use::Left::kDone, Now()); });
  }
  if (left != Use::Left::kSome) Retire(use, left);
}

// Ends a use that no thread works on any more. A use that is not done has failed with the group.
void Engine::Retire(Use& use, Use::Left left) {
  if (left == Use::Left::kFailed) failure_.AwaitTold();
  tensors_.Remove(use);
  records_.Event(FlightEvent::kTensorDone, use.label);
  if (left == Use::Left::kFailed) {
    return use.Complete(failure_.Explain(use.label, failure_.status()));
  }
  use.Complete(absl::OkStatus());
  farewell_.OnFinished();
}

// The watchdog: passes the time to the sequencer until the group fails, then ends everything.
void Engine::KeepTime() {
  do {
    failure_.Beat(Clock::now());
    TellSequencer([](Sequencer& s) { s.OnClock(Now()); });
  } while (!failure_.AwaitFailure(kBeat));
  EndAll();
}

// The group has failed: tells all ranks, and ends the uses that no thread is working on. Lanes and
// waiting callers end the others when they return.
void Engine::EndAll() {
  failure_.CarryThrough();
  executor_->Close();
  for (const UsePtr& use : tensors_.Close(failure_.status())) Retire(*use, Use::Left::kFailed);
}

// Passes each control frame to the part that handles it, until the control plane fails.
void Engine::ReadFrames() {
  for (;;) {
    const absl::StatusOr<ControlMessage> message = transport_.control->Receive();
    if (!message.ok()) return farewell_.OnControlLost(message.status());
    OnFrame(*message);
  }
}

void Engine::OnFrame(const ControlMessage& message) {
  const std::optional<ParsedFrame> parsed = ParseFrame(message.frame);
  if (!parsed.has_value()) {
    return failure_.Fail(
        absl::FailedPreconditionError("a peer sent a control frame of an unknown version"),
        Tell::kEveryone);
  }
  const OrderMessage& content = parsed->message;
  records_.Event(FlightEvent::kFrameIn, content.report.name, 0, message.from,
                 static_cast<uint64_t>(content.type));
  switch (content.type) {
    case FrameType::kFail: return failure_.OnPeerFailed(parsed->failure, parsed->silent);
    case FrameType::kBye: return farewell_.OnBye(message.from, parsed->started);
    case FrameType::kByeHeard: return farewell_.OnByeHeard(message.from);
    case FrameType::kPong: farewell_.OnPong(message.from); [[fallthrough]];
    default: return TellSequencer([&](Sequencer& s) { s.OnMessage(message.from, content, Now()); });
  }
}

// Waits until all ranks have the reason, since the caller may end its process next.
void Engine::Abort(absl::Status reason) {
  failure_.Fail(std::move(reason), Tell::kEveryone);
  failure_.AwaitTold();
}

void Engine::EndStep() {
  if (!transport_.empty()) TellSequencer([](Sequencer& s) { s.EndStep(Now()); });
}

void Engine::ForgetStep() {
  if (!transport_.empty()) TellSequencer([](Sequencer& s) { s.ForgetStep(Now()); });
}

bool Engine::GoesRaw(const TensorView& input) const {
  return thinwire::GoesRaw(input.bytes(), members_.size, options_);
}

Stats Engine::stats() const {
  Stats stats = records_.stats();
  if (!transport_.empty()) stats.wire_bytes = transport_.data->bytes_sent() - sent_before_;
  return stats;
}

std::string Engine::Describe() const {
  const absl::Status status = failure_.status();
  std::string text = absl::StrCat("rank ", members_.rank, " of ", members_.size, ": ",
                                  status.ok() ? "in order" : std::string(status.message()), "\n",
                                  tensors_.Describe());
  if (!transport_.empty()) {
    const absl::MutexLock lock(&mu_);
    absl::StrAppend(&text, sequencer_.Describe());
  }
  absl::StrAppend(&text, "last events:\n", records_.LastEvents());
  return text;
}

}  // namespace thinwire
