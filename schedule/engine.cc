#include "schedule/engine.h"

#include <cstring>
#include <mutex>

#include "absl/strings/str_cat.h"
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

absl::Status CheckRequest(const AllReduceRequest& request, int rank, const Options& options) {
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
  if (covered == in.numel) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, "its segments have ", covered,
                                                 " elements together, expected ", in.numel));
}

// A world of one: the mean and the sum of one tensor are that tensor, or its momentum.
class Alone final : public Engine {
 public:
  explicit Alone(const Options& options) : options_(options) {}

  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    const std::lock_guard lock(mu_);
    if (!status_.ok()) return status_;
    ++all_reduces_;
    if (options_.momentum.beta != 0.0f) {
      ApplyMomentum(request);
    } else if (request.input.data != request.output.data) {
      std::memmove(request.output.data, request.input.data, request.input.bytes());
    }
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

 private:
  void ApplyMomentum(const AllReduceRequest& request) {
    const size_t numel = request.input.numel;
    BucketLayout layout{.segments = {request.segments.begin(), request.segments.end()},
                        .owned = {},
                        .momentum = true};
    if (layout.segments.empty()) {
      layout.segments = {
          {.name = std::string(request.key), .offset = 0, .count = numel, .total = numel}};
    }
    const BucketMemory memory = feedback_.Bind(request.key, layout);
    std::vector<float> scratch(MomentumStep::ScratchFloats(options_.momentum, numel));
    MomentumStep step(options_.momentum, {memory.momentum.get(), numel}, scratch);
    step.Before(CpuBackend(), request.input, 0);
    step.After(CpuBackend(), request.output, 0);
  }

  const Options options_;
  mutable std::mutex mu_;
  absl::Status status_;
  uint64_t all_reduces_ = 0;
  ErrorFeedback feedback_;
};

// Checks what needs no peer, once, for both engines.
class Checked final : public Engine {
 public:
  Checked(int rank, const Options& options, std::unique_ptr<Engine> engine)
      : rank_(rank), options_(options), engine_(std::move(engine)) {}
  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    if (absl::Status bad = CheckRequest(request, rank_, options_); !bad.ok()) return bad;
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

 private:
  const int rank_;
  const Options options_;
  const std::unique_ptr<Engine> engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Options& options,
                                                       std::unique_ptr<Transport> transport) {
  if (absl::Status bad = CheckOptions(options); !bad.ok()) return bad;
  const int rank = transport == nullptr ? 0 : transport->rank();
  std::unique_ptr<Engine> engine;
  if (transport == nullptr || transport->size() == 1) {
    engine = std::make_unique<Alone>(options);
  } else {
    engine = std::make_unique<Group>(options, std::move(transport));
  }
  return std::make_unique<Checked>(rank, options, std::move(engine));
}

}  // namespace thinwire
