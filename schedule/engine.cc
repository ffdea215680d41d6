#include "schedule/engine.h"

#include <atomic>
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
  if (options.timeout <= std::chrono::milliseconds(0)) {
    return absl::InvalidArgumentError("the timeout must be longer than nothing");
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const AllReduceRequest& request, int rank) {
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
  size_t covered = request.segments.empty() ? in.numel : 0;
  for (const Segment& segment : request.segments) {
    covered += segment.count;
    if (segment.offset + segment.count > segment.total) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, "segment '", segment.name, "' ends at element ",
                       segment.offset + segment.count, " of ", segment.total));
    }
  }
  if (covered == in.numel) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, "its segments have ", covered,
                                                 " elements together, expected ", in.numel));
}

// A world of one: the mean and the sum of one tensor are that tensor.
class Alone final : public Engine {
 public:
  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    if (absl::Status failed = status(); !failed.ok()) return failed;
    if (request.input.data != request.output.data) {
      std::memmove(request.output.data, request.input.data, request.input.bytes());
    }
    ++all_reduces_;
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
  Stats stats() const override { return {.all_reduces = all_reduces_}; }
  ErrorFeedback& error_feedback() override { return feedback_; }

 private:
  mutable std::mutex mu_;
  absl::Status status_;
  std::atomic<uint64_t> all_reduces_{0};
  ErrorFeedback feedback_;
};

// Checks what needs no peer, once, for both engines.
class Checked final : public Engine {
 public:
  Checked(int rank, std::unique_ptr<Engine> engine) : rank_(rank), engine_(std::move(engine)) {}
  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override {
    if (absl::Status bad = CheckRequest(request, rank_); !bad.ok()) return bad;
    if (request.input.numel == 0) return DoneWork();
    return engine_->AllReduce(request);
  }
  void Abort(absl::Status reason) override { engine_->Abort(std::move(reason)); }
  absl::Status status() const override { return engine_->status(); }
  Stats stats() const override { return engine_->stats(); }
  ErrorFeedback& error_feedback() override { return engine_->error_feedback(); }

 private:
  const int rank_;
  const std::unique_ptr<Engine> engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Options& options,
                                                       std::unique_ptr<Transport> transport) {
  if (absl::Status bad = CheckOptions(options); !bad.ok()) return bad;
  const int rank = transport == nullptr ? 0 : transport->rank();
  std::unique_ptr<Engine> engine;
  if (transport == nullptr || transport->size() == 1) {
    engine = std::make_unique<Alone>();
  } else {
    engine = std::make_unique<Group>(options, std::move(transport));
  }
  return std::make_unique<Checked>(rank, std::move(engine));
}

}  // namespace thinwire
