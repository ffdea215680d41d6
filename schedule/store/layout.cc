#include "schedule/store/layout.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"

namespace thinwire {

StoreLayout::StoreLayout(const Options& options)
    : options_(options), loads_(static_cast<size_t>(options.servers), 0) {
  hash_ = HashCombine(HashCombine(static_cast<uint64_t>(options.servers), options.slice_elements),
                      options.bigarray_bound);
}

size_t StoreLayout::StepOf(const StoreKey& key) const {
  if (key.numel < options_.bigarray_bound) return key.numel;
  size_t step = options_.slice_elements != 0 ? options_.slice_elements : kSliceElements;
  if (key.width > 0) return std::max<size_t>(1, kRowSlice * step / key.width) * key.width;
  if (options_.slice_elements != 0) return step;
  while (std::max(EncodedBytes(key.codec.up, step), EncodedBytes(key.codec.down, step)) >
         kSliceBytes) {
    step /= 2;
  }
  return step;
}

absl::Status StoreLayout::Add(std::span<const StoreKey> keys) {
  std::set<std::string_view> seen;
  for (const StoreKey& key : keys) {
    if (key.numel == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("key '", key.name, "' has no elements, expected 1 or more"));
    }
    if (key.width != 0 && key.numel % key.width != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "key '", key.name, "' has ", key.numel, " elements, expected whole rows of ", key.width));
    }
    if (index_.contains(key.name) || !seen.insert(key.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "key '", key.name, "' is initialised already; init it once, and push to it afterwards"));
    }
  }
  const size_t first = slices_.size();
  for (const StoreKey& key : keys) {
    const size_t step = StepOf(key);
    const size_t begin = slices_.size();
    for (size_t at = 0; at < key.numel; at += step) {
      slices_.push_back({keys_.size(), at, std::min(step, key.numel - at), 0});
    }
    index_.emplace(key.name, keys_.size());
    keys_.push_back(key);
    ranges_.push_back({begin, slices_.size()});
    for (const uint64_t part : {HashBytes(key.name), key.numel, key.width, step}) {
      hash_ = HashCombine(hash_, part);
    }
  }
  std::vector<size_t> order(slices_.size() - first);
  std::iota(order.begin(), order.end(), first);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return slices_[a].count > slices_[b].count; });
  for (const size_t slice : order) {
    const auto least = std::min_element(loads_.begin(), loads_.end());
    slices_[slice].server = static_cast<int>(least - loads_.begin());
    *least += slices_[slice].count;
  }
  return absl::OkStatus();
}

absl::Status StoreLayout::Find(std::string_view key, size_t* index) const {
  const auto found = index_.find(key);
  if (found == index_.end()) {
    return absl::NotFoundError(absl::StrCat(
        "key '", std::string(key), "' is not initialised; call init first, on every ", "worker"));
  }
  *index = found->second;
  return absl::OkStatus();
}

}  // namespace thinwire
