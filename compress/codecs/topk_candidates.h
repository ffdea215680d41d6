// Candidates: the elements that may be among the k largest, topk's working set.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_

#include <algorithm>
#include <array>
#include <bit>
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

// The border between the k largest of some values and the others.
struct Border {
  uint32_t key;  // of the k-th largest
  size_t ties;   // of the values with that key, so many are among the k largest
};

// One pass counts the values in bins, as fine as their range allows, and the few of the right bin
// are sorted out in `spare`, which has room for all. Bins are looked through from the lowest: most
// values lie there, and few of those are dropped.
inline Border BorderOf(const uint32_t* bits, size_t count, size_t k, uint32_t* spare) {
  constexpr size_t kBins = 1024, kFewBins = 128, kFew = 1024;
  // Signed, since no instruction set of 64-bit processors lacks those comparisons.
  int32_t lowest = static_cast<int32_t>(kAllKeys), highest = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto key = static_cast<int32_t>(bits[i] & kAbsMask);
    lowest = std::min(lowest, key);
    highest = std::max(highest, key);
  }
  const size_t used = count <= kFew ? kFewBins : kBins;
  const auto range = static_cast<uint32_t>(highest - lowest);
  const int shift = std::max(
      0, static_cast<int>(std::bit_width(range)) - static_cast<int>(std::bit_width(used) - 1));
  const auto bin_of = [=](uint32_t key) { return (key - static_cast<uint32_t>(lowest)) >> shift; };
  std::array<uint32_t, kBins> bins;
  std::fill_n(bins.begin(), used, 0u);
  for (size_t i = 0; i < count; ++i) ++bins[bin_of(bits[i] & kAbsMask)];
  size_t below = 0;  // values in lower bins
  uint32_t bin = 0;
  while (below + bins[bin] <= count - k) below += bins[bin++];
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t key = bits[i] & kAbsMask;
    spare[found] = key;
    found += bin_of(key) == bin;
  }
  const size_t rank = below + found - (count - k);  // of the k-th largest in its bin, from 1
  std::nth_element(spare, spare + rank - 1, spare + found, std::greater<uint32_t>());
  const uint32_t key = spare[rank - 1];
  const auto larger = std::count_if(spare, spare + rank, [=](uint32_t v) { return v > key; });
  return {key, rank - static_cast<size_t>(larger)};
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
  // goes. Returns the k-th key. Which ones go can't be foreseen, so nothing branches on it.
  template <typename Dropped>
  uint32_t KeepLargest(Dropped dropped) {
    const Border border = BorderOf(bits_, count_, k_, spare_);
    const uint32_t last = border.key;
    const size_t ties = border.ties;
    // Whether candidate i goes; asked in ascending order, `equal` counting the ties so far.
    const auto goes = [this, last, ties](size_t i, size_t* equal) {
      const uint32_t key = bits_[i] & kAbsMask;
      const size_t tie = key == last;
      const size_t drop =
          static_cast<size_t>(key < last) | (tie & static_cast<size_t>(*equal >= ties));
      *equal += tie;
      return drop;
    };
    size_t dropping = 0, kept = 0;
    for (size_t i = 0, equal = 0; i < count_; ++i) {
      spare_[dropping] = static_cast<uint32_t>(i);
      dropping += goes(i, &equal);
    }
    for (size_t d = 0; d < dropping; ++d) dropped(index_[spare_[d]], value(spare_[d]));
    for (size_t i = 0, equal = 0; i < count_; ++i) {
      const size_t keep = 1 - goes(i, &equal);
      index_[kept] = index_[i];
      bits_[kept] = bits_[i];
      kept += keep;
    }
    count_ = kept;
    return last;
  }

  // The first candidate, from `from` on, whose index is `index` or more.
  size_t FirstFrom(size_t index, size_t from) const {
    const auto at = std::lower_bound(index_ + from, index_ + count_, index);
    return static_cast<size_t>(at - index_);
  }

  // Calls visit(index, value) for each whose key is below `key`. Which ones can't be foreseen, so
  // they are noted first.
  template <typename Visit>
  void ForEachBelow(uint32_t key, Visit visit) {
    size_t noted = 0;
    for (size_t i = 0; i < count_; ++i) {
      spare_[noted] = static_cast<uint32_t>(i);
      noted += (bits_[i] & kAbsMask) < key;
    }
    for (size_t n = 0; n < noted; ++n) visit(index_[spare_[n]], value(spare_[n]));
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
