#include "schedule/leader.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compress/types.h"

namespace thinwire {
namespace {

std::string Describe(const Report& report) {
  return absl::StrCat(report.numel, " elements of ",
                      std::string(Name(static_cast<DType>(report.dtype))), ", ",
                      report.op == 0 ? "mean" : "sum", report.raw ? ", raw" : "");
}

bool Agree(const Report& a, const Report& b) {
  return a.numel == b.numel && a.plan_hash == b.plan_hash && a.dtype == b.dtype && a.op == b.op &&
         a.raw == b.raw && a.chunks == b.chunks;
}

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
  auto [it, is_new] = tensors_.try_emplace(report.id());
  Tensor& tensor = it->second;
  if (is_new) {
    tensor.first = report;
    tensor.first_rank = rank;
    tensor.reported.resize(world_);
    tensor.overdue.resize(world_);
    tensor.submitted = ++clock_;
  }
  return tensor;
}

absl::Status Leader::OnReport(int rank, const Report& report) {
  Tensor& tensor = Find(rank, report);
  if (!Agree(tensor.first, report)) {
    return absl::FailedPreconditionError(
        absl::StrCat("tensor '", report.name, "': rank ", tensor.first_rank, " has ",
                     Describe(tensor.first), ", but rank ", rank, " has ", Describe(report),
                     "; call with the same tensors in the same order on every rank"));
  }
  if (tensor.reported[rank]) return absl::OkStatus();
  tensor.reported[rank] = true;
  if (++tensor.reports == world_ && !tensor.first.raw && !tensor.planned) {
    tensor.complete = ++clock_;
    ready_.push_back(report.id());
  }
  return absl::OkStatus();
}

void Leader::Expect(const Report& report) {
  Tensor& tensor = Find(0, report);
  tensor.planned = true;
  tensor.announced = report.chunks;
}

bool Leader::AllHave(uint64_t id) const {
  const auto found = tensors_.find(id);
  return found != tensors_.end() && found->second.reports == world_;
}

bool Leader::Before(const Tensor& a, const Tensor& b) const {
  if (policy_ == Policy::kFifo) return a.submitted < b.submitted;
  if (policy_ == Policy::kP3 && a.first.priority != b.first.priority) {
    return a.first.priority < b.first.priority;
  }
  return a.complete < b.complete;
}

std::vector<Announcement> Leader::Next() {
  std::vector<Announcement> order;
  while (!ready_.empty()) {
    const auto first = std::min_element(
        ready_.begin(), ready_.end(),
        [this](uint64_t a, uint64_t b) { return Before(tensors_.at(a), tensors_.at(b)); });
    Tensor& tensor = tensors_.at(*first);
    const size_t bytes = ChunkBytes(tensor.first);
    if (unfinished_bytes_ > 0 && unfinished_bytes_ + bytes > window_bytes_) break;
    unfinished_bytes_ += bytes;
    order.push_back({tensor.first.id(), tensor.announced, 0});
    if (++tensor.announced == tensor.first.chunks) ready_.erase(first);
  }
  return order;
}

void Leader::OnChunkDone(uint64_t id) {
  const auto it = tensors_.find(id);
  if (it == tensors_.end()) return;
  if (!it->second.planned) unfinished_bytes_ -= ChunkBytes(it->second.first);
  if (++it->second.done == it->second.first.chunks) tensors_.erase(it);
}

void Leader::OnOverdue(int rank, const Report& report) { Find(rank, report).overdue[rank] = true; }

std::string Leader::WaitingFor(int rank, uint64_t except) const {
  for (const auto& [id, tensor] : tensors_) {
    if (id != except && tensor.reported[rank] && tensor.reports < world_) {
      return absl::StrCat("; rank ", rank, " has '", tensor.first.name, "' ready instead");
    }
  }
  return "";
}

absl::Status Leader::Diagnose(uint64_t id) const {
  const auto it = tensors_.find(id);
  if (it == tensors_.end()) return absl::DeadlineExceededError("a tensor passed its deadline");
  const Tensor& tensor = it->second;
  const std::string subject = absl::StrCat("tensor '", tensor.first.name, "' (",
                                           Describe(tensor.first), ") passed its deadline: ");
  if (const std::vector<int> missing = Unset(tensor.reported); !missing.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(subject, Ranks(missing), " never submitted it, expected a call on all ",
                     world_, " ranks", WaitingFor(missing.front(), id),
                     "; let every rank make the same calls, or raise the timeout"));
  }
  const std::vector<int> silent = Unset(tensor.overdue);
  if (!silent.empty() && static_cast<int>(silent.size()) < world_) {
    return absl::DeadlineExceededError(
        absl::StrCat(subject, Ranks(silent), " submitted it and then fell silent",
                     "; look whether the process is stopped or its link is down"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat(subject, "all ranks submitted it, but the exchange did not finish",
                   "; look at the link, or raise the timeout"));
}

}  // namespace thinwire
