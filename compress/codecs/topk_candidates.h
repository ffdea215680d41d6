// Candidates: the elements that may be among the k largest, topk's working set.
#ifndef THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_
#define THINWIRE_COMPRESS_CODECS_TOPK_CANDIDATES_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "compress/element_math.h"
#include "compress/simd_kernels.h"
#include "compress/stages.h"

namespace thinwire::codecs {

inline constexpr uint32_t kAllKeys = kAbsMask;  // the largest key there is

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

  // Makes room for `more`, for which everything but the k largest may go; as KeepLargest. Returns
  // what a further element must reach to be among them: ties go to the lower index, which is
  // already here.
  template <typename Dropped>
  uint32_t MakeRoom(size_t more, uint32_t low, uint32_t sure, Dropped dropped) {
    if (count_ + more <= capacity_) return low;
    return KeepLargest(0, sure, dropped) + 1;
  }

  // Drops all but the k largest, of equal ones the first; calls dropped(index, value) for each that
  // goes with a key of `sure` or more. Returns the k-th key. `guess` as for FindKey.
  template <typename Dropped>
  uint32_t KeepLargest(uint32_t guess, uint32_t sure, Dropped dropped) {
    const simd::RankedKey last = simd::FindKey(bits_, count_, count_ - k_, guess, spare_);
    const simd::Border border{last.key, TiesEnd(last)};
    if (sure <= last.key) {
      const size_t beyond = simd::FindBeyond(border, sure, bits_, count_, spare_);
      for (size_t i = 0; i < beyond; ++i) dropped(index_[spare_[i]], value(spare_[i]));
    }
    count_ = simd::KeepWithin(border, index_, bits_, count_);
    return last.key;
  }

  // The first candidate, from `from` on, whose index is `index` or more.
  size_t FirstFrom(size_t index, size_t from) const {
    const auto at = std::lower_bound(index_ + from, index_ + count_, index);
    return static_cast<size_t>(at - index_);
  }

  // Writes the entries of all, and calls settle(index, rest) for each whose key is below `sure` and
  // that stores a residual; `rest` is what sending leaves. No candidates are left.
  template <typename Settle>
  void Encode(uint32_t sure, uint8_t* entries, Settle settle) {
    const uint32_t *index = index_, *bits = bits_;  // which `settle` can't change
    const size_t unsure = simd::EncodeEntries(sure, index_, bits_, count_, entries);
    for (size_t i = 0; i < unsure; ++i) settle(index[i], FloatOf(bits[i]));
    count_ = 0;
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

  // Candidates with the k-th key are dropped from here on: more than k have that key or a
  // larger one only where there are ties.
  size_t TiesEnd(const simd::RankedKey& last) const {
    size_t end = count_;
    for (size_t going = count_ - k_ - last.below; going > 0;) {
      --end;
      going -= (bits_[end] & kAbsMask) == last.key;
    }
    return end;
  }

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
