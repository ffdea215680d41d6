#include "compress/error_feedback.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

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

// Elements [begin, begin + count) of a bucket, which are elements [offset, offset + count) of the
// segment's parameter. This rank owns all of them or none.
struct Run {
  size_t begin = 0;
  size_t offset = 0;
  size_t count = 0;
  bool owned = false;
};

// Calls visit(segment, its first element, ranges), and ranges(visit) calls visit(run) for each run
// of the segment. So a caller looks its parameter up once per segment.
template <typename Visit>
void ForEachSegment(const BucketLayout& layout, Visit visit) {
  size_t begin = 0;
  auto range = layout.owned.begin();
  for (const Segment& segment : layout.segments) {
    const size_t end = begin + segment.count;
    const auto first = range;
    while (range != layout.owned.end() && range->end <= end) ++range;
    visit(segment, [&, begin, end, first](auto run) {
      size_t at = begin;
      for (auto owned = first; at < end; ++owned) {
        const bool any = owned != layout.owned.end() && owned->begin < end;
        const size_t from = any ? std::max(owned->begin, at) : end;
        const size_t to = any ? std::min(owned->end, end) : end;
        if (at < from) run(Run{at, segment.offset + at - begin, from - at, false});
        if (from < to) run(Run{from, segment.offset + from - begin, to - from, true});
        at = std::max(at, to);
      }
    });
    begin = end;
  }
}

void CopyFloats(const float* from, size_t count, float* to) {
  if (count > 0) std::memcpy(to, from, count * sizeof(float));
}

void Clear(float* values, size_t count) {
  if (values != nullptr) std::fill_n(values, count, 0.0f);
}

void Put(const float* from, size_t count, float* to) {
  if (to != nullptr) CopyFloats(from, count, to);
}

// Zeros are skipped, not added, so that an unchanged layout returns the same bits, -0 included.
float Merge(float same_hop, float other_hop, float factor) {
  return other_hop == 0.0f ? same_hop : same_hop + other_hop * factor;
}

// A bucket's arrays on the host, the residual first: host memory as it is, device memory copied to
// `room`.
absl::StatusOr<std::vector<const float*>> ArraysOnHost(const FloatMemory& where,
                                                       const BucketMemory& memory, size_t numel,
                                                       std::vector<std::vector<float>>* room) {
  std::vector<const float*> arrays = {memory.residual.get()};
  for (const auto& array : memory.arrays) arrays.push_back(array.get());
  if (!where.on_device()) return arrays;
  for (const float*& array : arrays) {
    std::vector<float>& copy = room->emplace_back(numel);
    if (absl::Status bad = where.Read(array, memory.fence.get(), copy); !bad.ok()) return bad;
    array = copy.data();
  }
  return arrays;
}

absl::Status UnknownParameter(std::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat("no residual is kept for parameter '",
                                                 std::string(name),
                                                 "'; parameters() lists the known ones"));
}

absl::Status WrongSize(std::string_view name, size_t expected, size_t got) {
  return absl::InvalidArgumentError(absl::StrCat("the residual of '", std::string(name), "' has ",
                                                 expected, " elements, got room for ", got));
}

// The destinations of one parameter's arrays; null: not requested.
struct Places {
  float* first = nullptr;
  float* second = nullptr;
  size_t numel = 0;
  absl::InlinedVector<const StateArray*, 2> others;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const BucketMemory>> ErrorFeedback::Bind(
    std::string_view bucket, const BucketLayout& layout) {
  const auto found = buckets_.find(bucket);
  if (found != buckets_.end() && found->second.layout == layout) return found->second.memory;
  if (absl::Status bad = ReleaseHoldersOf(bucket, layout, {}); !bad.ok()) return bad;
  absl::StatusOr<BucketMemory> allocated = Allocate(layout);
  if (!allocated.ok()) return allocated.status();
  if (absl::Status bad = Fill(layout, *allocated); !bad.ok()) return bad;
  for (const Segment& segment : layout.segments) {
    if (segment.count == segment.total) parked_.erase(segment.name);
  }
  Learn(layout);
  const auto memory = std::make_shared<const BucketMemory>(*std::move(allocated));
  buckets_[std::string(bucket)] = {layout, memory};
  return memory;
}

absl::StatusOr<BucketMemory> ErrorFeedback::Allocate(const BucketLayout& layout) const {
  BucketMemory memory;
  if (absl::Status bad = AllocateKept(layout, &memory); !bad.ok()) return bad;
  if (memory_.on_device()) memory.fence = std::make_shared<Fence>(slots_);
  if (layout.carried > 0) {
    absl::StatusOr<std::shared_ptr<float[]>> carried = memory_.Allocate(layout.carried);
    if (!carried.ok()) return carried.status();
    memory.carried = *std::move(carried);
    const std::vector<float> zeros(layout.carried);
    if (absl::Status bad = memory_.Write(zeros, memory.carried.get()); !bad.ok()) return bad;
  }
  if (!undo_) return memory;
  BucketMemory copy;
  if (absl::Status bad = AllocateKept(layout, &copy); !bad.ok()) return bad;
  memory.undo = std::make_shared<UndoLog>(std::move(copy.residual), std::move(copy.arrays),
                                          memory_.on_device());
  return memory;
}

absl::Status ErrorFeedback::AllocateKept(const BucketLayout& layout, BucketMemory* memory) const {
  const size_t count = CountOf(layout);
  absl::StatusOr<std::shared_ptr<float[]>> floats = memory_.Allocate(count);
  if (!floats.ok()) return floats.status();
  memory->residual = *std::move(floats);
  for (size_t i = 0; i < layout.arrays.size(); ++i) {
    floats = memory_.Allocate(count);
    if (!floats.ok()) return floats.status();
    memory->arrays.push_back(*std::move(floats));
  }
  return absl::OkStatus();
}

absl::Status ErrorFeedback::ReleaseHoldersOf(std::string_view bucket, const BucketLayout& layout,
                                             const NameSet& dropped) {
  std::vector<std::string> holders;
  // New parameters are in no bucket: checking every one would make the first step quadratic in the
  // number of tensors.
  const auto is_new = [this](const Segment& segment) { return Find(segment.name) == nullptr; };
  if (std::all_of(layout.segments.begin(), layout.segments.end(), is_new) &&
      !buckets_.contains(bucket)) {
    return absl::OkStatus();
  }
  for (const auto& [key, held] : buckets_) {
    if (key != bucket && !Overlap(held.layout, layout)) continue;
    if (held.memory.use_count() > 1) {
      return absl::FailedPreconditionError(
          absl::StrCat("residuals of tensor '", key, "' are in use"));
    }
    holders.push_back(key);
  }
  for (const std::string& key : holders) {
    if (absl::Status bad = Unload(buckets_.at(key), dropped); !bad.ok()) return bad;
    buckets_.erase(key);
  }
  return absl::OkStatus();
}

// Parks what a bucket holds, except for the parameters in `dropped`.
absl::Status ErrorFeedback::Unload(const Bucket& bucket, const NameSet& dropped) {
  const BucketLayout& layout = bucket.layout;
  if (std::all_of(layout.segments.begin(), layout.segments.end(),
                  [&](const Segment& segment) { return dropped.contains(segment.name); })) {
    return absl::OkStatus();
  }
  std::vector<std::vector<float>> room;
  const auto arrays = ArraysOnHost(memory_, *bucket.memory, CountOf(layout), &room);
  if (!arrays.ok()) return arrays.status();
  ForEachSegment(layout, [&](const Segment& segment, auto for_each_run) {
    if (dropped.contains(segment.name)) return;
    ParameterResidual& parameter = parked_[segment.name];
    parameter.second_hop_weight = layout.second_hop_weight;
    parameter.first.resize(segment.total);
    parameter.second.resize(segment.total);
    std::vector<float*> others;
    for (const std::string& name : layout.arrays) {
      std::vector<float>& array = parameter.arrays[name];
      array.resize(segment.total);
      others.push_back(array.data());
    }
    for_each_run([&](const Run& run) {
      float* const first = parameter.first.data() + run.offset;
      float* const second = parameter.second.data() + run.offset;
      CopyFloats(arrays->front() + run.begin, run.count, run.owned ? second : first);
      Clear(run.owned ? first : second, run.count);
      for (size_t i = 0; i < others.size(); ++i) {
        CopyFloats((*arrays)[i + 1] + run.begin, run.count, others[i] + run.offset);
      }
    });
  });
  return absl::OkStatus();
}

// Moves a bucket's elements from the parked ones to its memory.
absl::Status ErrorFeedback::Fill(const BucketLayout& layout, const BucketMemory& memory) {
  const size_t numel = CountOf(layout);
  std::vector<std::vector<float>> rooms;  // of arrays that are copied to a device
  const auto place = [&](float* memory) {
    return memory_.on_device() ? rooms.emplace_back(numel).data() : memory;
  };
  float* const residual = place(memory.residual.get());
  std::vector<float*> arrays;
  for (const auto& array : memory.arrays) arrays.push_back(place(array.get()));
  const float weight = layout.second_hop_weight;
  ForEachSegment(layout, [&](const Segment& segment, auto for_each_run) {
    const auto parked = parked_.find(segment.name);
    ParameterResidual* const from = parked == parked_.end() ? nullptr : &parked->second;
    if (from != nullptr) {  // it may have been parked with another size
      from->first.resize(segment.total);
      from->second.resize(segment.total);
    }
    std::vector<const float*> others(arrays.size());
    for (size_t i = 0; from != nullptr && i < arrays.size(); ++i) {
      const auto found = from->arrays.find(layout.arrays[i]);
      if (found == from->arrays.end()) continue;
      found->second.resize(segment.total);
      others[i] = found->second.data();
    }
    for_each_run([&](const Run& run) {
      for (size_t i = 0; i < arrays.size(); ++i) {
        float* const to = arrays[i] + run.begin;
        if (others[i] == nullptr) {
          Clear(to, run.count);
        } else {
          CopyFloats(others[i] + run.offset, run.count, to);
        }
      }
      float* const to = residual + run.begin;
      if (from == nullptr) return Clear(to, run.count);
      float* const first = from->first.data() + run.offset;
      float* const second = from->second.data() + run.offset;
      const float old_weight = from->second_hop_weight, ratio = old_weight / weight;
      for (size_t i = 0; i < run.count; ++i) {
        to[i] = run.owned ? Merge(old_weight == weight ? second[i] : second[i] * ratio, first[i],
                                  1.0f / weight)
                          : Merge(first[i], second[i], old_weight);
      }
      if (segment.count == segment.total) return;  // the caller drops it as a whole
      Clear(first, run.count);
      Clear(second, run.count);
    });
  });
  if (rooms.empty()) return absl::OkStatus();
  absl::Status bad = memory_.Write(rooms[0], memory.residual.get());
  for (size_t i = 0; bad.ok() && i < memory.arrays.size(); ++i) {
    bad = memory_.Write(rooms[i + 1], memory.array(i));
  }
  return bad;
}

void ErrorFeedback::Learn(const BucketLayout& layout) {
  for (const Segment& segment : layout.segments) {
    const auto at = std::lower_bound(
        known_.begin(), known_.end(), segment.name,
        [](const Known& known, const std::string& name) { return known.name < name; });
    if (at != known_.end() && at->name == segment.name) {
      at->numel = segment.total;
    } else {
      known_.insert(at, {segment.name, segment.total});
    }
  }
}

const ErrorFeedback::Known* ErrorFeedback::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      known_.begin(), known_.end(), name,
      [](const Known& known, std::string_view wanted) { return known.name < wanted; });
  return at == known_.end() || at->name != name ? nullptr : &*at;
}

size_t ErrorFeedback::Numel(std::string_view name) const {
  const Known* const known = Find(name);
  return known == nullptr ? 0 : known->numel;
}

absl::Status ErrorFeedback::Export(std::span<const StateArray> arrays) const {
  absl::flat_hash_map<std::string_view, Places> places;
  for (const StateArray& array : arrays) {
    const Known* const known = Find(array.parameter);
    if (known == nullptr) return UnknownParameter(array.parameter);
    if (array.values.size() != known->numel) {
      return WrongSize(array.parameter, known->numel, array.values.size());
    }
    Places& place = places[array.parameter];
    place.numel = known->numel;
    if (array.array == kFirstHop) {
      place.first = array.values.data();
    } else if (array.array == kSecondHop) {
      place.second = array.values.data();
    } else {
      place.others.push_back(&array);
    }
  }
  // First parked elements, or zeros; a bucket that holds the parameter overwrites them below.
  NameSet whole;  // parameters of which one bucket has all elements
  for (const auto& [key, bucket] : buckets_) {
    for (const Segment& segment : bucket.layout.segments) {
      if (segment.count == segment.total && Numel(segment.name) == segment.total) {
        whole.insert(segment.name);
      }
    }
  }
  for (const StateArray& array : arrays) {
    const bool is_residual = array.array == kFirstHop || array.array == kSecondHop;
    if (is_residual && whole.contains(array.parameter)) continue;
    const auto parked = parked_.find(array.parameter);
    const std::vector<float>* from = nullptr;
    if (parked != parked_.end()) {
      const ParameterResidual& residual = parked->second;
      const auto found = residual.arrays.find(array.array);
      from = array.array == kFirstHop         ? &residual.first
             : array.array == kSecondHop      ? &residual.second
             : found == residual.arrays.end() ? nullptr
                                              : &found->second;
    }
    const size_t count = from == nullptr ? 0 : std::min(from->size(), array.values.size());
    if (count > 0) CopyFloats(from->data(), count, array.values.data());
    Clear(array.values.data() + count, array.values.size() - count);
  }
  for (const auto& [key, bucket] : buckets_) {
    const BucketLayout& layout = bucket.layout;
    if (std::none_of(layout.segments.begin(), layout.segments.end(),
                     [&](const Segment& segment) { return places.contains(segment.name); })) {
      continue;
    }
    std::vector<std::vector<float>> room;
    const auto kept = ArraysOnHost(memory_, *bucket.memory, CountOf(layout), &room);
    if (!kept.ok()) return kept.status();
    ForEachSegment(layout, [&](const Segment& segment, auto for_each_run) {
      const auto place = places.find(segment.name);
      // A bucket of a former model may hold elements of a parameter whose size has changed.
      if (place == places.end() || place->second.numel != segment.total) return;
      float* const first = place->second.first;
      float* const second = place->second.second;
      for_each_run([&](const Run& run) {
        Put(kept->front() + run.begin, run.count,
            run.owned ? (second == nullptr ? nullptr : second + run.offset)
                      : (first == nullptr ? nullptr : first + run.offset));
        float* const zero = run.owned ? first : second;
        if (zero != nullptr) Clear(zero + run.offset, run.count);
        for (const StateArray* other : place->second.others) {
          const auto name = std::find(layout.arrays.begin(), layout.arrays.end(), other->array);
          if (name == layout.arrays.end()) continue;
          CopyFloats((*kept)[name - layout.arrays.begin() + 1] + run.begin, run.count,
                     other->values.data() + run.offset);
        }
      });
    });
  }
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Import(std::span<const StateArray> arrays, float second_hop_weight) {
  BucketLayout all;
  NameSet names;
  absl::flat_hash_map<std::string_view, size_t> sizes;
  for (const StateArray& array : arrays) {
    const Known* const known = Find(array.parameter);
    const auto [size, is_new] = sizes.emplace(array.parameter, array.values.size());
    const size_t expected = known != nullptr ? known->numel : size->second;
    if (array.values.size() != expected) {
      return WrongSize(array.parameter, expected, array.values.size());
    }
    if (!is_new) continue;
    names.insert(array.parameter);
    all.segments.push_back({.name = std::string(array.parameter),
                            .offset = 0,
                            .count = array.values.size(),
                            .total = array.values.size()});
  }
  if (absl::Status bad = ReleaseHoldersOf("", all, names); !bad.ok()) {
    if (!absl::IsFailedPrecondition(bad)) return bad;
    return absl::FailedPreconditionError(absl::StrCat(
        names.size() == 1 ? absl::StrCat("the residual of '", std::string(*names.begin()), "'")
                          : absl::StrCat("the residuals of ", names.size(), " parameters"),
        " can't be replaced while its allreduce is in flight; wait for it first"));
  }
  for (const std::string_view name : names) parked_.erase(std::string(name));
  for (const StateArray& array : arrays) {
    ParameterResidual& parameter = parked_[std::string(array.parameter)];
    parameter.second_hop_weight = second_hop_weight;
    std::vector<float>& to = array.array == kFirstHop ? parameter.first
                             : array.array == kSecondHop
                                 ? parameter.second
                                 : parameter.arrays[std::string(array.array)];
    to.assign(array.values.begin(), array.values.end());
  }
  Learn(all);
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Export(std::string_view name, ParameterResidual* out) const {
  const Known* const known = Find(name);
  if (known == nullptr) return UnknownParameter(name);
  const size_t numel = known->numel;
  ParameterResidual all;
  if (const auto parked = parked_.find(name); parked != parked_.end()) {
    all.second_hop_weight = parked->second.second_hop_weight;
    for (const auto& [array, values] : parked->second.arrays) all.arrays[array].resize(numel);
  }
  for (const auto& [key, bucket] : buckets_) {
    for (const Segment& segment : bucket.layout.segments) {
      if (segment.name != name) continue;
      all.second_hop_weight = bucket.layout.second_hop_weight;
      for (const std::string& array : bucket.layout.arrays) all.arrays[array].resize(numel);
    }
  }
  all.first.resize(numel);
  all.second.resize(numel);
  std::vector<StateArray> arrays = {{name, kFirstHop, all.first}, {name, kSecondHop, all.second}};
  for (auto& [array, values] : all.arrays) arrays.push_back({name, array, values});
  if (absl::Status bad = Export(arrays); !bad.ok()) return bad;
  *out = std::move(all);
  return absl::OkStatus();
}

absl::Status ErrorFeedback::Import(std::string_view name, ParameterResidual residual) {
  std::vector<StateArray> arrays = {{name, kFirstHop, residual.first},
                                    {name, kSecondHop, residual.second}};
  for (auto& [array, values] : residual.arrays) arrays.push_back({name, array, values});
  return Import(arrays, residual.second_hop_weight);
}

absl::Status ErrorFeedback::Undo() {
  for (const auto& [key, bucket] : buckets_) {
    const BucketMemory& memory = *bucket.memory;
    if (memory.undo == nullptr) continue;
    if (bucket.memory.use_count() > 1) {
      return absl::FailedPreconditionError(
          absl::StrCat("the last use of tensor '", key,
                       "' can't be taken back while it is in flight; wait for it first"));
    }
    const absl::Status status = memory.undo->Restore(
        memory_, memory.fence.get(), CountOf(bucket.layout), memory.residual.get(), memory.arrays);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace thinwire
