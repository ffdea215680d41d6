#include "compress/error_feedback.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

ParameterResidual& Grow(ParameterResidual& residual, size_t total, bool momentum) {
  residual.first.resize(total);
  residual.second.resize(total);
  if (momentum) residual.momentum.resize(total);
  return residual;
}

size_t CountOf(const BucketLayout& layout) {
  size_t count = 0;
  for (const Segment& segment : layout.segments) count += segment.count;
  return count;
}

bool Overlap(const BucketLayout& a, const BucketLayout& b) {
  std::multimap<std::string_view, const Segment*> named;
  for (const Segment& segment : a.segments) named.emplace(segment.name, &segment);
  for (const Segment& segment : b.segments) {
    const auto [first, last] = named.equal_range(segment.name);
    for (auto it = first; it != last; ++it) {
      const Segment& other = *it->second;
      if (segment.offset < other.offset + other.count &&
          other.offset < segment.offset + segment.count) {
        return true;
      }
    }
  }
  return false;
}

// Calls visit(element, segment, index in its parameter, owned) for every element in order.
template <typename Visit>
void ForEachElement(const BucketLayout& layout, Visit visit) {
  size_t element = 0;
  auto range = layout.owned.begin();
  for (const Segment& segment : layout.segments) {
    for (size_t i = 0; i < segment.count; ++i, ++element) {
      while (range != layout.owned.end() && element >= range->end) ++range;
      const bool owned = range != layout.owned.end() && element >= range->begin;
      visit(element, segment, segment.offset + i, owned);
    }
  }
}

// Zeros are skipped, not added, so that an unchanged layout gives back the very bits, -0 included.
float Merge(float same_hop, float other_hop, float factor) {
  return other_hop == 0.0f ? same_hop : same_hop + other_hop * factor;
}

}  // namespace

absl::StatusOr<BucketMemory> ErrorFeedback::Bind(std::string_view bucket,
                                                 const BucketLayout& layout) {
  const auto found = buckets_.find(bucket);
  if (found != buckets_.end() && found->second.layout == layout) return found->second.memory;
  if (absl::Status status = ReleaseHoldersOf(bucket, layout); !status.ok()) return status;
  absl::StatusOr<BucketMemory> memory = Allocate(layout);
  if (!memory.ok()) return memory.status();
  const Floats floats = Load(layout);
  absl::Status status = memory_.Write(floats.residual, memory->residual.get());
  if (status.ok()) status = memory_.Write(floats.momentum, memory->momentum.get());
  if (!status.ok()) return status;
  buckets_[std::string(bucket)] = {layout, *memory};
  return memory;
}

absl::StatusOr<BucketMemory> ErrorFeedback::Allocate(const BucketLayout& layout) const {
  absl::StatusOr<BucketMemory> memory = AllocateKept(layout);
  if (!memory.ok()) return memory;
  if (memory_.on_device()) memory->fence = std::make_shared<Fence>(slots_);
  if (layout.carried > 0) {
    absl::StatusOr<std::shared_ptr<float[]>> carried = memory_.Allocate(layout.carried);
    if (!carried.ok()) return carried.status();
    memory->carried = *std::move(carried);
    const std::vector<float> zeros(layout.carried);
    if (absl::Status bad = memory_.Write(zeros, memory->carried.get()); !bad.ok()) return bad;
  }
  if (!undo_) return memory;
  absl::StatusOr<BucketMemory> copy = AllocateKept(layout);
  if (!copy.ok()) return copy;
  memory->undo = std::make_shared<UndoLog>(std::move(copy->residual), std::move(copy->momentum),
                                           memory_.on_device());
  return memory;
}

absl::StatusOr<BucketMemory> ErrorFeedback::AllocateKept(const BucketLayout& layout) const {
  BucketMemory memory;
  absl::StatusOr<std::shared_ptr<float[]>> floats = memory_.Allocate(CountOf(layout));
  if (!floats.ok()) return floats.status();
  memory.residual = *std::move(floats);
  if (!layout.momentum) return memory;
  floats = memory_.Allocate(CountOf(layout));
  if (!floats.ok()) return floats.status();
  memory.momentum = *std::move(floats);
  return memory;
}

absl::Status ErrorFeedback::ReleaseHoldersOf(std::string_view bucket, const BucketLayout& layout) {
  std::vector<std::string> holders;
  for (const auto& [key, held] : buckets_) {
    if (key != bucket && !Overlap(held.layout, layout)) continue;
    if (held.memory.residual.use_count() > 1) {
      return absl::FailedPreconditionError(
          absl::StrCat("residuals of tensor '", key, "' are in use"));
    }
    holders.push_back(key);
  }
  ++generation_;
  for (const std::string& key : holders) {
    if (absl::Status status = Unload(buckets_.at(key), &parked_); !status.ok()) return status;
    buckets_.erase(key);
  }
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Unload(const Bucket& bucket, Parameters* into) const {
  const absl::StatusOr<Floats> floats = Fetch(bucket);
  if (!floats.ok()) return floats.status();
  for (const Segment& segment : bucket.layout.segments) {
    Grow((*into)[segment.name], segment.total, bucket.layout.momentum).second_hop_weight =
        bucket.layout.second_hop_weight;
  }
  ForEachElement(bucket.layout, [&](size_t element, const Segment& segment, size_t i, bool owned) {
    ParameterResidual& parameter = into->find(segment.name)->second;
    (owned ? parameter.second : parameter.first)[i] = floats->residual[element];
    (owned ? parameter.first : parameter.second)[i] = 0.0f;
    if (bucket.layout.momentum) parameter.momentum[i] = floats->momentum[element];
  });
  return absl::OkStatus();
}

// Takes a bucket's elements out of what is parked.
ErrorFeedback::Floats ErrorFeedback::Load(const BucketLayout& layout) {
  Floats floats;
  floats.residual.resize(CountOf(layout));
  if (layout.momentum) floats.momentum.resize(CountOf(layout));
  const float weight = layout.second_hop_weight;
  for (const Segment& segment : layout.segments) {
    Grow(parked_[segment.name], segment.total, layout.momentum);
  }
  ForEachElement(layout, [&](size_t element, const Segment& segment, size_t i, bool owned) {
    ParameterResidual& from = parked_.find(segment.name)->second;
    const float old_weight = from.second_hop_weight;
    const float second =
        old_weight == weight ? from.second[i] : from.second[i] * (old_weight / weight);
    floats.residual[element] = owned ? Merge(second, from.first[i], 1.0f / weight)
                                     : Merge(from.first[i], from.second[i], old_weight);
    from.first[i] = from.second[i] = 0.0f;
    if (layout.momentum) floats.momentum[element] = from.momentum[i];
  });
  for (const Segment& segment : layout.segments) {
    if (segment.count == segment.total) parked_.erase(segment.name);
  }
  return floats;
}

absl::StatusOr<ErrorFeedback::Floats> ErrorFeedback::Fetch(const Bucket& bucket) const {
  const BucketMemory& memory = bucket.memory;
  Floats floats;
  floats.residual.resize(CountOf(bucket.layout));
  if (bucket.layout.momentum) floats.momentum.resize(CountOf(bucket.layout));
  const Fence* const after = memory.fence.get();
  absl::Status status = memory_.Read(memory.residual.get(), after, floats.residual);
  if (status.ok()) status = memory_.Read(memory.momentum.get(), after, floats.momentum);
  if (!status.ok()) return status;
  return floats;
}

std::vector<std::string> ErrorFeedback::Names() const {
  std::set<std::string> names;
  for (const auto& [name, residual] : parked_) names.insert(name);
  for (const auto& [key, bucket] : buckets_) {
    for (const Segment& segment : bucket.layout.segments) names.insert(segment.name);
  }
  return {names.begin(), names.end()};
}

size_t ErrorFeedback::Numel(std::string_view name) const {
  if (const auto it = parked_.find(name); it != parked_.end()) return it->second.first.size();
  for (const auto& [key, bucket] : buckets_) {
    for (const Segment& segment : bucket.layout.segments) {
      if (segment.name == name) return segment.total;
    }
  }
  return 0;
}

absl::Status ErrorFeedback::Export(std::string_view name, ParameterResidual* out) const {
  const size_t total = Numel(name);
  Parameters gathered;
  if (const auto it = parked_.find(name); it != parked_.end()) gathered.insert(*it);
  for (const auto& [key, bucket] : buckets_) {
    for (const Segment& segment : bucket.layout.segments) {
      if (segment.name != name) continue;
      if (absl::Status status = Unload(bucket, &gathered); !status.ok()) return status;
      break;
    }
  }
  const auto it = gathered.find(name);
  if (it == gathered.end()) {
    return absl::InvalidArgumentError(absl::StrCat("no residual is kept for parameter '",
                                                   std::string(name),
                                                   "'; Names() lists the known ones"));
  }
  *out = Grow(it->second, total, false);
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Import(std::string_view name, ParameterResidual residual) {
  BucketLayout all;
  const size_t total = residual.first.size();
  all.segments.push_back({.name = std::string(name), .offset = 0, .count = total, .total = total});
  if (absl::Status status = ReleaseHoldersOf("", all); !status.ok()) {
    if (!absl::IsFailedPrecondition(status)) return status;
    return absl::FailedPreconditionError(
        absl::StrCat("the residual of '", std::string(name),
                     "' can't be replaced while its allreduce is in flight; wait for it first"));
  }
  parked_[std::string(name)] = std::move(residual);
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Undo() {
  for (const auto& [key, bucket] : buckets_) {
    const BucketMemory& memory = bucket.memory;
    if (memory.undo == nullptr) continue;
    if (memory.residual.use_count() > 1) {
      return absl::FailedPreconditionError(
          absl::StrCat("the last use of tensor '", key,
                       "' can't be taken back while it is in flight; wait for it first"));
    }
    const absl::Status status =
        memory.undo->Restore(memory_, memory.fence.get(), CountOf(bucket.layout),
                             memory.residual.get(), memory.momentum.get());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace thinwire
