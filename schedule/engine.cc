#include "schedule/engine.h"

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "compress/codec_list.h"
#include "kernels/tuning.h"
#include "schedule/group.h"
#include "schedule/in_flight.h"

namespace thinwire {
namespace {

absl::Status CheckOptions(const Options& options) {
  if (options.lanes < 1 || options.lanes > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("lanes is ", options.lanes, ", expected 1 to 64"));
  }
  if (options.chunk_bytes < 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_bytes is ", options.chunk_bytes, ", expected at least 4096"));
  }
  if (options.codecs.empty()) return absl::InvalidArgumentError("there must be a codec");
  if (!(options.momentum.beta >= 0.0f && options.momentum.beta < 1.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("momentum is ", options.momentum.beta, ", expected 0 to below 1"));
  }
  if (options.timeout <= std::chrono::milliseconds(0)) {
    return absl::InvalidArgumentError("the timeout must be longer than nothing");
  }
  return absl::OkStatus();
}

// A kernel can't be asked to read what is not its device's, or not aligned to an element.
absl::Status CheckPlace(const TensorView& view, const Device& device) {
  if (!device.Holds(view.data)) {
    return absl::InvalidArgumentError(absl::StrCat("its memory is not of ", device.name(),
                                                   ", expected a tensor on that device; move it"));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % SizeOf(view.dtype) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("its address is no multiple of the ",
                                                 SizeOf(view.dtype), " bytes of an element; ",
                                                 "align it, or copy it"));
}

absl::Status CheckRequest(const AllReduceRequest& request, int rank, const Options& options,
                          const Device* device) {
  const std::string where =
      absl::StrCat("rank ", rank, ", tensor '", std::string(request.key), "': ");
  const TensorView &in = request.input, &out = request.output;
  if (in.numel != out.numel || in.dtype != out.dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, "the output has ", out.numel, " elements of ", std::string(Name(out.dtype)),
        ", expected ", in.numel, " of ", std::string(Name(in.dtype)), " as the input has"));
  }
  if (in.numel > 0 && (in.data == nullptr || out.data == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "got a null pointer for ", in.numel, " elements"));
  }
  for (const TensorView* view : {&in, &out}) {
    if (device == nullptr || in.numel == 0) break;
    if (absl::Status bad = CheckPlace(*view, *device); !bad.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(where, bad.message()));
    }
  }
  if (options.momentum.beta != 0.0f && request.key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "momentum is kept by name, and this call has none; give it a name"));
  }
  if (options.momentum.beta != 0.0f && request.op != Op::kMean) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "momentum goes with the mean, got the sum; a sum of every rank's ",
                     "momentum would count it once a rank"));
  }
  size_t covered = request.segments.empty() ? in.numel : 0;
  for (const Segment& segment : request.segments) {
    covered += segment.count;
    if (segment.offset + segment.count > segment.total) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, "segment '", segment.name, "' ends at element ",
                       segment.offset + segment.count, " of ", segment.total));
    }
    if (segment.codec >= options.codecs.size()) {
      return absl::InvalidArgumentError(absl::StrCat(where, "segment '", segment.name,
                                                     "' wants codec ", segment.codec, ", expected ",
                                                     "0 to ", options.codecs.size() - 1));
    }
  }
  const size_t segments = std::max<size_t>(1, request.segments.size());
  for (const uint32_t number : request.absent) {
    if (number < segments) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(where, "segment ", number, " is absent, expected 0 to ", segments - 1));
  }
  if (covered == in.numel) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, "its segments have ", covered,
                                                 " elements together, expected ", in.numel));
}

// A world of one: the mean and the sum of one tensor are that tensor, or its momentum. On a device
// that is the work of the caller's own stream.
class Alone final : public Engine {
 public:
  Alone(const Options& options, std::shared_ptr<Device> device)
      : options_(options),
        device_(std::move(device)),
        feedback_(device_, 1),
        scratch_(device_.get()) {}

  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return status_;
    ++all_reduces_;
    const std::unique_ptr<DeviceStream> stream =
        device_ == nullptr ? nullptr : device_->Adopt(request.stream);
    const Backend& backend = stream == nullptr ? CpuBackend() : stream->backend();
    if (options_.momentum.beta != 0.0f) {
      status_ = ApplyMomentum(request, backend, stream.get());
    } else {
      backend.Copy(request.output.data, request.input.data, request.input.bytes());
    }
    if (status_.ok() && stream != nullptr) status_ = stream->status();
    if (!status_.ok()) return status_;
    return DoneWork();
  }
  void Abort(absl::Status reason) override {
    const std::lock_guard lock(mu_);
    if (status_.ok()) status_ = std::move(reason);
  }
  absl::Status status() const override {
    const std::lock_guard lock(mu_);
    return status_;
  }
  Stats stats() const override {
    const std::lock_guard lock(mu_);
    return {.all_reduces = all_reduces_};
  }
  ErrorFeedback& error_feedback() override { return feedback_; }
  const std::vector<CodecPair>& codecs() const override { return options_.codecs; }
  bool GoesRaw(const TensorView&) const override { return true; }
  void SetStep(uint64_t) override {}
  void EndStep() override {}

 private:
  absl::Status ApplyMomentum(const AllReduceRequest& request, const Backend& backend,
                             DeviceStream* stream) {
    const size_t numel = request.input.numel;
    BucketLayout layout{.segments = {request.segments.begin(), request.segments.end()},
                        .owned = {},
                        .momentum = true};
    if (layout.segments.empty()) {
      layout.segments = {
          {.name = std::string(request.key), .offset = 0, .count = numel, .total = numel}};
    }
    const absl::StatusOr<BucketMemory> memory = feedback_.Bind(request.key, layout);
    if (!memory.ok()) return memory.status();
    scratch_.Reset();
    const std::span<float> scratch =
        scratch_.TakeOf<float>(MomentumStep::ScratchFloats(options_.momentum, numel));
    if (!scratch_.status().ok()) return scratch_.status();
    if (stream != nullptr) memory->fence->HoldBack(*stream);
    MomentumStep step(options_.momentum, {memory->momentum.get(), numel}, scratch);
    step.Before(backend, request.input, 0);
    step.After(backend, request.output, 0);
    if (stream != nullptr) memory->fence->Set(0, stream->Record());
    return absl::OkStatus();
  }

  const Options options_;
  const std::shared_ptr<Device> device_;  // null: the host
  mutable std::mutex mu_;
  absl::Status status_;
  uint64_t all_reduces_ = 0;
  ErrorFeedback feedback_;
  LaneBuffers scratch_;
};

// Checks what needs no peer, once, for both engines.
class Checked final : public Engine {
 public:
  Checked(int rank, const Options& options, std::shared_ptr<Device> device,
          std::unique_ptr<Engine> engine)
      : rank_(rank), options_(options), device_(std::move(device)), engine_(std::move(engine)) {}
  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    if (absl::Status bad = CheckRequest(request, rank_, options_, device_.get()); !bad.ok())
      return bad;
    if (request.input.numel == 0) return DoneWork();
    return engine_->AllReduce(request);
  }
  void Abort(absl::Status reason) override { engine_->Abort(std::move(reason)); }
  absl::Status status() const override { return engine_->status(); }
  Stats stats() const override { return engine_->stats(); }
  ErrorFeedback& error_feedback() override { return engine_->error_feedback(); }
  const std::vector<CodecPair>& codecs() const override { return engine_->codecs(); }
  bool GoesRaw(const TensorView& input) const override { return engine_->GoesRaw(input); }
  void SetStep(uint64_t step) override { engine_->SetStep(step); }
  void EndStep() override { engine_->EndStep(); }

 private:
  const int rank_;
  const Options options_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<Engine> engine_;
};

// `options` as the group settled them.
absl::Status CheckKernels(const Options& options, int size, const Device& device) {
  for (const CodecPair& codec : options.codecs) {
    if (InfoOf(codec.up.id).kind != CodecKind::kEntries) continue;
    return absl::UnimplementedError(
        absl::StrCat("topk has no kernels for ", device.name(),
                     " yet; take onebit or int4 there, or reduce topk tensors on the host"));
  }
  if (size <= static_cast<int>(kernels::kMaxWires)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("a group on ", device.name(), " has at most ",
                                               kernels::kMaxWires, " ranks, got ", size));
}

absl::StatusOr<std::unique_ptr<Engine>> CreateGroup(const Options& given,
                                                    std::unique_ptr<Transport> transport,
                                                    std::shared_ptr<Device> device) {
  const Options options = Group::Settle(given, transport->size());
  if (device != nullptr) {
    if (absl::Status bad = CheckKernels(options, transport->size(), *device); !bad.ok()) return bad;
  }
  absl::StatusOr<Group::Lanes> lanes = Group::MakeLanes(options, *transport, device.get());
  if (!lanes.ok()) return lanes.status();
  return std::make_unique<Group>(options, std::move(transport), std::move(device),
                                 *std::move(lanes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Options& options,
                                                       std::unique_ptr<Transport> transport,
                                                       std::shared_ptr<Device> device) {
  if (absl::Status bad = CheckOptions(options); !bad.ok()) return bad;
  const int rank = transport == nullptr ? 0 : transport->rank();
  std::unique_ptr<Engine> engine;
  if (transport == nullptr || transport->size() == 1) {
    engine = std::make_unique<Alone>(options, device);
  } else {
    absl::StatusOr<std::unique_ptr<Engine>> group =
        CreateGroup(options, std::move(transport), device);
    if (!group.ok()) return group.status();
    engine = *std::move(group);
  }
  return std::make_unique<Checked>(rank, options, std::move(device), std::move(engine));
}

}  // namespace thinwire
