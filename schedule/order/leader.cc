#include "schedule/order/leader.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thinwire {
namespace {

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::vector<int> Unset(const std::vector<bool>& flags) {
  std::vector<int> ranks;
  for (size_t r = 0; r < flags.size(); ++r) {
    if (!flags[r]) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

}  // namespace

Leader::Leader(int world, Policy policy, size_t window_bytes)
    : world_(world), policy_(policy), window_bytes_(window_bytes) {}

Leader::Tensor& Leader::Find(int rank, const Report& report) {
  if (Tensor* const known = tensors_.Find(report.id())) return *known;
  Tensor& tensor = tensors_.Insert(report.id());
  tensor.first = report;
  tensor.first_rank = rank;
  tensor.reported.assign(world_, false);
  tensor.reports = 0;
  tensor.submitted = ++clock_;
  tensor.complete = tensor.predicted = 0;
  tensor.announced = tensor.done = 0;
  largest_chunk_ = std::max(largest_chunk_, ChunkBytes(report));
  return tensor;
}

absl::Status Leader::OnReport(int rank, const Report& report) {
  Tensor& tensor = Find(rank, report);
  absl::Status differs = CheckAgreement(tensor.first_rank, tensor.first, rank, report);
  if (!differs.ok()) return differs;
  if (tensor.reported[rank]) return absl::OkStatus();
  tensor.reported[rank] = true;
  if (++tensor.reports == world_ && !tensor.first.direct && tensor.predicted == 0) {
    tensor.complete = ++clock_;
    ready_.push_back(report.id());
  }
  return absl::OkStatus();
}

void Leader::Expect(const Report& report) {
  Tensor& tensor = Find(0, report);
  tensor.predicted = ++clock_;
  tensor.announced = report.chunks;
}

bool Leader::Expects(uint64_t id) const {
  const Tensor* const tensor = tensors_.Find(id);
  return tensor != nullptr && tensor->predicted != 0;
}

const Report* Leader::Unreported(int rank) const {
  for (const auto& [id, tensor] : tensors_) {
    if (tensor.predicted != 0 && !tensor.reported[rank]) return &tensor.first;
  }
  return nullptr;
}

bool Leader::AllHave(uint64_t id) const {
  const Tensor* const tensor = tensors_.Find(id);
  return tensor != nullptr && tensor->reports == world_;
}

bool Leader::Before(const Tensor& a, const Tensor& b) const {
  return GoesBefore(policy_, {a.submitted, a.complete, a.first.priority},
                    {b.submitted, b.complete, b.first.priority});
}

// True if another chunk will be announced before one of `bytes`, announced last, is finished.
bool Leader::FollowsSurely(size_t bytes) const {
  return !ready_.empty() && bytes + largest_chunk_ <= window_bytes_;
}

void Leader::Next(std::vector<Announcement>* order) {
  while (!ready_.empty()) {
    const auto first = std::min_element(
        ready_.begin(), ready_.end(),
        [this](uint64_t a, uint64_t b) { return Before(*tensors_.Find(a), *tensors_.Find(b)); });
    Tensor& tensor = *tensors_.Find(*first);
    const size_t bytes = ChunkBytes(tensor.first);
    // Once the chunk that waits for a follower is the only one left, it gets one, however large.
    const bool over = unfinished_bytes_ + bytes > window_bytes_;
    if (over && unfinished_bytes_ > undrained_bytes_) break;
    unfinished_bytes_ += bytes;
    order->push_back({tensor.first.id(), tensor.announced, 0});
    if (++tensor.announced == tensor.first.chunks) ready_.erase(first);
    const bool follows = FollowsSurely(bytes);
    order->back().drain = follows ? 0 : 1;
    undrained_bytes_ = follows ? bytes : 0;
  }
}

void Leader::OnChunkDone(uint64_t id) {
  Tensor* const tensor = tensors_.Find(id);
  if (tensor == nullptr) return;
  if (tensor->predicted == 0) unfinished_bytes_ -= ChunkBytes(tensor->first);
  if (++tensor->done == tensor->first.chunks) tensors_.Erase(id);
}

std::string Leader::WaitingFor(int rank, uint64_t except) const {
  for (const auto& [id, tensor] : tensors_) {
    if (id != except && tensor.reported[rank] && tensor.reports < world_) {
      return absl::StrCat("; rank ", rank, " has '", tensor.first.name, "' ready instead");
    }
  }
  return "";
}

// The first predicted tensor before a late one that some rank has not submitted: its chunks hold
// the lanes that the late one waits for.
const Leader::Tensor* Leader::HoldsUp(const Tensor& late) const {
  const Tensor* first = nullptr;
  for (const auto& [id, tensor] : tensors_) {
    const bool before = tensor.predicted != 0 && tensor.predicted < late.predicted;
    if (!before || tensor.reports == world_) continue;
    if (first == nullptr || tensor.predicted < first->predicted) first = &tensor;
  }
  return first;
}

absl::Status Leader::NeverSubmitted(const Tensor& tensor, const std::string& consequence,
                                    const std::vector<int>& silent) const {
  const std::vector<int> missing = Unset(tensor.reported);
  const bool stopped = std::includes(silent.begin(), silent.end(), missing.begin(), missing.end());
  const std::string mend =
      stopped ? ", and no answer comes from there; look whether the process is stopped or its link "
                "is down"
              : absl::StrCat(WaitingFor(missing.front(), tensor.first.id()),
                             "; let every rank make the same calls, or raise the timeout");
  return absl::DeadlineExceededError(absl::StrCat(
      "tensor '", tensor.first.name, "' (", DescribeReport(tensor.first), ") ", consequence, ": ",
      Ranks(missing), " never submitted it, expected a call on all ", world_, " ranks", mend));
}

absl::Status Leader::Diagnose(uint64_t id, const std::vector<int>& silent) const {
  const Tensor* const tensor = tensors_.Find(id);
  if (tensor == nullptr) return absl::DeadlineExceededError("a tensor passed its deadline");
  if (tensor->reports < world_) return NeverSubmitted(*tensor, "passed its deadline", silent);
  if (const Tensor* const holding = HoldsUp(*tensor)) {
    return NeverSubmitted(
        *holding,
        absl::StrCat("was predicted from the step before and holds up '", tensor->first.name, "'"),
        silent);
  }
  const std::string subject =
      absl::StrCat("tensor '", tensor->first.name, "' (", DescribeReport(tensor->first),
                   ") passed its deadline: ");
  if (!silent.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(subject, Ranks(silent), " submitted it and then fell silent",
                     "; look whether the process is stopped or its link is down"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(subject, "all ranks submitted it, but the exchange did not finish",
                   "; look at the link, or raise the timeout"));
}

std::string Leader::Describe() const {
  std::string text;
  for (const auto& [id, tensor] : tensors_) {
    if (tensor.reports == world_) continue;
    absl::StrAppend(&text, "tensor '", tensor.first.name, "' call ", tensor.first.call,
                    tensor.predicted == 0 ? "" : " (predicted)", " waits for ",
                    Ranks(Unset(tensor.reported)), " to submit it\n");
  }
  return text;
}

}  // namespace thinwire
