// Candidates: the elements that may be among the k largest, topk's working set.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "compress/hd.h"
#include "compress/stages.h"

namespace thinwire::codecs {

inline constexpr uint32_t kAllKeys = kAbsMask;  // the largest key there is

// The key of the k-th largest of `count` values. One pass counts them in bins, as fine as their
// range allows, and the few of the right bin are sorted out in `spare`, which has room for all.
inline uint32_t KthLargest(const uint32_t* bits, size_t count, size_t k, uint32_t* spare) {
  constexpr size_t kBins = 1024;
  uint32_t lowest = kAllKeys, highest = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t key = bits[i] & kAbsMask;
    lowest = std::min(lowest, key);
    highest = std::max(highest, key);
  }
  int shift = 0;
  while ((highest - lowest) >> shift >= kBins) ++shift;
  const auto bin_of = [=](uint32_t key) { return (key - lowest) >> shift; };
  std::array<uint32_t, kBins> bins{};
  for (size_t i = 0; i < count; ++i) ++bins[bin_of(bits[i] & kAbsMask)];
  uint32_t bin = bin_of(highest);
  while (bins[bin] < k) k -= bins[bin--];
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t key = bits[i] & kAbsMask;
    spare[found] = key;
    found += bin_of(key) == bin;
  }
  std::nth_element(spare, spare + k - 1, spare + found, std::greater<uint32_t>());
  return spare[k - 1];
}

// Elements by ascending index.
class Candidates {
 public:
  // `scratch` has ScratchWords(k, numel) words.
  Candidates(std::span<uint32_t> scratch, size_t k, size_t numel)
      : capacity_(Capacity(k, numel)),
        k_(k),
        index_(scratch.data()),
        bits_(index_ + capacity_ + kSlack),
        spare_(bits_ + capacity_ + kSlack) {}

  static size_t ScratchWords(size_t k, size_t numel) { return 3 * (Capacity(k, numel) + kSlack); }

  size_t count() const { return count_; }
  uint32_t index(size_t i) const { return index_[i]; }
  float value(size_t i) const { return FloatOf(bits_[i]); }
  uint32_t* next_index() { return index_ + count_; }
  uint32_t* next_bits() { return bits_ + count_; }
  void Grow(size_t by) { count_ += by; }

  // Makes room for `more`, for which everything but the k largest may go. Returns what a further
  // element must reach to be among them: ties go to the lower index, which is already here.
  template <typename Dropped>
  uint32_t MakeRoom(size_t more, uint32_t low, Dropped dropped) {
    if (count_ + more <= capacity_) return low;
    return KeepLargest(dropped) + 1;
  }

  // Drops all but the k largest, of equal ones the first; calls dropped(index, value) for each that
  // goes. Returns the k-th key.
  template <typename Dropped>
  uint32_t KeepLargest(Dropped dropped) {
    const uint32_t last = KthLargest(bits_, count_, k_, spare_);
    size_t larger = 0;
    for (size_t i = 0; i < count_; ++i) larger += (bits_[i] & kAbsMask) > last;
    size_t ties = k_ - larger, kept = 0;
    for (size_t i = 0; i < count_; ++i) {
      const uint32_t key = bits_[i] & kAbsMask;
      if (key < last || (key == last && ties == 0)) {
        dropped(index_[i], FloatOf(bits_[i]));
        continue;
      }
      ties -= key == last;
      index_[kept] = index_[i];
      bits_[kept++] = bits_[i];
    }
    count_ = kept;
    return last;
  }

  // Drops from candidate `from` on those whose index is listed.
  void Forget(const std::vector<uint32_t>& indices, size_t from) {
    size_t kept = from;
    for (size_t i = from; i < count_; ++i) {
      if (std::binary_search(indices.begin(), indices.end(), index_[i])) continue;
      index_[kept] = index_[i];
      bits_[kept++] = bits_[i];
    }
    count_ = kept;
  }

  // Candidates [0, sorted) ascend, and the rest do; after this all do.
  void Merge(size_t sorted) {
    std::vector<std::pair<uint32_t, uint32_t>> all(count_);
    for (size_t i = 0; i < count_; ++i) all[i] = {index_[i], bits_[i]};
    std::inplace_merge(all.begin(), all.begin() + static_cast<ptrdiff_t>(sorted), all.end());
    for (size_t i = 0; i < count_; ++i) std::tie(index_[i], bits_[i]) = all[i];
  }

 private:
  static constexpr size_t kSlack = 16;  // words that a vector may write behind the last candidate

  // One stage always fits in, so that room need only be made between stages.
  static size_t Capacity(size_t k, size_t numel) {
    return std::min(numel, 3 * k + 2 * kStage) + kStage;
  }

  const size_t capacity_, k_;
  uint32_t* const index_;
  uint32_t* const bits_;
  uint32_t* const spare_;
  size_t count_ = 0;
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_
