#include "schedule/store/work_queue.h"

#include <algorithm>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace thinwire {
namespace {

constexpr uint64_t kMost = uint64_t{1} << 48;
constexpr uint64_t kMaxBatch = std::numeric_limits<uint32_t>::max();  // fits StoreHead::slice

}  // namespace

absl::StatusOr<WorkPlan> WorkPlan::Parse(std::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(std::string(text), ' ');
  WorkPlan plan;
  if (words.size() == 3 && absl::SimpleAtoi(words[0], &plan.samples) &&
      absl::SimpleAtoi(words[1], &plan.batch) && absl::SimpleAtoi(words[2], &plan.epochs) &&
      plan.samples <= kMost && plan.batch >= 1 && plan.batch <= kMaxBatch && plan.epochs <= kMost) {
    return plan;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the work is '", std::string(text), "', expected samples, the samples of a ",
                   "batch, of which there is one or more, and epochs"));
}

std::string WorkPlan::ToString() const { return absl::StrCat(samples, " ", batch, " ", epochs); }

void WorkQueue::Apply(int worker, uint64_t number) {
  std::map<uint64_t, WorkRange>& held = held_[worker];
  held.erase(held.begin(), held.upper_bound(number));
}

std::optional<WorkRange> WorkQueue::Take(int worker, uint64_t number) {
  std::map<uint64_t, WorkRange>& held = held_[worker];
  if (const auto again = held.find(number); again != held.end()) return again->second;
  WorkRange range;
  if (!returned_.empty()) {
    range = returned_.front();
    returned_.pop_front();
  } else if (plan_.samples > 0 && epoch_ < plan_.epochs) {
    range = {epoch_, first_, std::min(plan_.batch, plan_.samples - first_)};
    first_ += range.count;
    if (first_ == plan_.samples) {
      ++epoch_;
      first_ = 0;
    }
  } else {
    const bool is_over = std::all_of(held_.begin(), held_.end(),
                                     [](const auto& entry) { return entry.second.empty(); });
    return is_over ? std::optional(WorkRange()) : std::nullopt;
  }
  held[number] = range;
  return range;
}

void WorkQueue::GiveBack(int worker) {
  const auto held = held_.find(worker);
  if (held == held_.end()) return;
  for (auto range = held->second.rbegin(); range != held->second.rend(); ++range) {
    returned_.push_front(range->second);
  }
  held_.erase(held);
}

void WorkQueue::Save(ByteWriter& to) const {
  const auto save = [&](const WorkRange& range) {
    to.Number(range.epoch);
    to.Number(range.first);
    to.Number(range.count);
  };
  to.Number(epoch_);
  to.Number(first_);
  to.Number(returned_.size());
  for (const WorkRange& range : returned_) save(range);
  to.Number(held_.size());
  for (const auto& [worker, ranges] : held_) {
    to.Number(static_cast<uint64_t>(worker));
    to.Number(ranges.size());
    for (const auto& [number, range] : ranges) {
      to.Number(number);
      save(range);
    }
  }
}

bool WorkQueue::Restore(ByteReader& from) {
  const auto restore = [&] {
    WorkRange range;
    range.epoch = from.Number();
    range.first = from.Number();
    range.count = from.Number();
    return range;
  };
  epoch_ = from.Number();
  first_ = from.Number();
  const uint64_t returned = from.Number();
  for (uint64_t i = 0; from.ok() && i < returned; ++i) returned_.push_back(restore());
  const uint64_t workers = from.Number();
  for (uint64_t i = 0; from.ok() && i < workers; ++i) {
    std::map<uint64_t, WorkRange>& held = held_[static_cast<int>(from.Number())];
    const uint64_t ranges = from.Number();
    for (uint64_t j = 0; from.ok() && j < ranges; ++j) {
      const uint64_t number = from.Number();
      held[number] = restore();
    }
  }
  return from.ok() && (first_ < plan_.samples || first_ == 0);
}

}  // namespace thinwire
