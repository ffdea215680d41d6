// How the k largest are found. A threshold is guessed: the last step's, or one from a sample. One
// pass adds the residual and collects what is not below it, the candidates. Whenever their room is
// full, all but the k largest are dropped and the threshold rises. If fewer than k were found, the
// threshold was too high, and further passes collect what lies below. So the result is exact
// whatever the guess was.
#include "compress/topk_encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "compress/codec_list.h"
#include "compress/simd_kernels.h"
#include "compress/stages.h"
#include "compress/topk.h"

namespace thinwire {
namespace {

constexpr size_t kSlack = 16;  // words that a vector may write behind the last candidate
constexpr size_t kSample = 4096;      // elements, at most; and at most an eighth of all
constexpr size_t kSampleFrom = 2048;  // elements; of fewer all are candidates
// Of the k-th magnitude: what the next step starts from. With feedback many elements wait just below
// it, so every percent less costs a tenth of k in candidates; it moves by less than this.
constexpr float kCarry = 63.0f / 64;
// What is tried below a threshold that was too high: close to it first.
constexpr float kRetreat[] = {0.875f, 0.5f, 0.25f};
constexpr uint32_t kAllKeys = kAbsMask;

size_t Capacity(size_t k, size_t numel) { return std::min(numel, 3 * k + 2 * kStage) + kStage; }

// The key of the k-th largest of `count` values. One pass counts them in bins, as fine as their
// range allows, and the few of the right bin are sorted out in `spare`, which has room for all.
uint32_t KthLargest(const uint32_t* bits, size_t count, size_t k, uint32_t* spare) {
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
  Candidates(std::span<uint32_t> scratch, size_t k, size_t numel)
      : capacity_(Capacity(k, numel)),
        k_(k),
        index_(scratch.data()),
        bits_(index_ + capacity_ + kSlack),
        spare_(bits_ + capacity_ + kSlack) {}

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
  const size_t capacity_, k_;
  uint32_t* const index_;
  uint32_t* const bits_;
  uint32_t* const spare_;
  size_t count_ = 0;
};

class Encoder {
 public:
  Encoder(const CodecSpec& spec, TensorView gradient, float* residual, const EncodeExtras& extras)
      : gradient_(gradient),
        residual_(residual),
        extras_(extras),
        masks_(extras.velocity != nullptr && spec.masking),
        k_(EntryCount(spec, gradient.numel)),
        own_scratch_(extras.scratch.empty() ? TopKScratchWords(spec, gradient.numel) : 0),
        candidates_(extras.scratch.empty() ? std::span(own_scratch_) : extras.scratch, k_,
                    gradient.numel) {
    momentum_ = {extras.velocity, extras.momentum, extras.nesterov};
  }

  void Run(const ShardLayout& layout, uint8_t* wire) {
    uint32_t low = FirstGuess();
    Collect(low);
    for (size_t i = 0; candidates_.count() < k_; ++i) {
      const uint32_t highest = low - 1;
      low = BitsOf(FloatOf(low) * kRetreat[std::min(i, std::size(kRetreat) - 1)]);
      if (low < kTinyBits) low = 0;
      CollectBelow(low, highest);
    }
    const uint32_t last = candidates_.KeepLargest(Restore());
    if (extras_.threshold != nullptr) *extras_.threshold = std::min(last, kHugeBits);
    Send(layout, wire);
  }

 private:
  bool WrittenAsSent(float x) const { return StoresResidual(x) && SelectionKey(x) >= sure_; }

  // What becomes of candidates that are not sent after all.
  std::function<void(size_t, float)> Restore() {
    return [this](size_t at, float x) {
      if (WrittenAsSent(x)) Put(residual_, at, x);
    };
  }

  // Also settles from where on elements are sent very probably: their residual is written as if
  // they were, while it is in cache, and put right for the few that are not.
  uint32_t FirstGuess() {
    if (extras_.threshold != nullptr && *extras_.threshold != 0) {
      if (residual_ != nullptr) sure_ = *extras_.threshold;
      return BitsOf(FloatOf(*extras_.threshold) * kCarry);
    }
    return gradient_.numel < kSampleFrom ? 0 : SampledThreshold();
  }

  // From every so-many-th element, jittered; low enough that k elements very probably reach it.
  uint32_t SampledThreshold() const {
    const size_t count = std::min(kSample, gradient_.numel / 8);
    const size_t stride = gradient_.numel / count;
    std::array<uint32_t, kSample> sample, spare;
    for (size_t i = 0; i < count; ++i) {
      const size_t at = i * stride + i * 40503u % stride;
      float x;
      ToFloats(gradient_.Slice(at, 1), &x);
      if (residual_ != nullptr) x += Get<float>(residual_, at);
      if (momentum_.u != nullptr) x += momentum_.beta * Get<float>(momentum_.u, at);
      sample[i] = BitsOf(x);
    }
    const double expected = static_cast<double>(count) * static_cast<double>(k_) /
                            static_cast<double>(gradient_.numel);
    const double generous = expected + 4 * std::sqrt(expected) + 4;
    if (generous >= static_cast<double>(count)) return 0;
    return std::min(
        KthLargest(sample.data(), count, static_cast<size_t>(generous), spare.data()),
        kHugeBits);
  }

  // x = g + r into the residual, and the candidates from `low` on.
  void Collect(uint32_t low) {
    ForEachStage(gradient_, [&](const float* g, size_t begin, size_t n) {
      low = std::min(candidates_.MakeRoom(n, low, Restore()), kAllKeys);  // nothing beats the largest NaN
      const auto at = static_cast<uint32_t>(begin);
      uint32_t *index = candidates_.next_index(), *bits = candidates_.next_bits();
      if (residual_ == nullptr) {
        candidates_.Grow(simd::Scan(g, n, at, low, kAllKeys, index, bits));
        return;
      }
      simd::Momentum momentum = momentum_;
      if (momentum.u != nullptr) momentum.u += begin;
      // Elements that are not finite must be seen, since they leave their residual alone; what they
      // are not larger than is dropped again.
      const simd::Thresholds keys{std::min(low, kHugeBits), std::max(low, sure_)};
      candidates_.Grow(simd::AddAndScan(g, residual_ + begin, momentum, n, at, keys, index, bits));
    });
  }

  // Rare, so it may allocate. The residual holds x now, but for elements that are not finite or
  // were written as sent; those are all among the candidates already.
  void CollectBelow(uint32_t low, uint32_t highest) {
    const size_t found = candidates_.count();
    std::vector<uint32_t> seen;
    for (size_t i = 0; i < found; ++i) {
      const float x = candidates_.value(i);
      if (!StoresResidual(x) || WrittenAsSent(x)) seen.push_back(candidates_.index(i));
    }
    const TensorView x = residual_ == nullptr ? gradient_ : TensorView{residual_, gradient_.numel};
    ForEachStage(x, [&](const float* part, size_t begin, size_t n) {
      low = candidates_.MakeRoom(n, low, Restore());
      const size_t before = candidates_.count();
      candidates_.Grow(simd::Scan(part, n, static_cast<uint32_t>(begin), low, highest,
                                  candidates_.next_index(), candidates_.next_bits()));
      if (residual_ != nullptr && !seen.empty()) candidates_.Forget(seen, before);
    });
    candidates_.Merge(found);
  }

  void Send(const ShardLayout& layout, uint8_t* wire) {
    uint8_t* entries = wire + layout.codes_at;
    size_t sent = 0;
    for (size_t b = 0; b < layout.blocks; ++b) {
      const size_t begin = sent, end = (b + 1) * kSubBlock;
      for (; sent < k_ && candidates_.index(sent) < end; ++sent) {
        Put(entries, sent, EntryOf(candidates_.value(sent), candidates_.index(sent)));
      }
      Put(wire, b, static_cast<uint32_t>(sent - begin));
    }
    if (residual_ == nullptr) return;
    for (size_t i = 0; i < k_; ++i) {
      const size_t at = candidates_.index(i);
      const float x = candidates_.value(i);
      if (!StoresResidual(x)) continue;
      if (!WrittenAsSent(x)) Put(residual_, at, x - FromBf16(ToBf16(x)));
      if (masks_) Put(momentum_.u, at, 0.0f);
    }
  }

  const TensorView gradient_;
  float* const residual_;
  const EncodeExtras& extras_;
  const bool masks_;
  const size_t k_;
  std::vector<uint32_t> own_scratch_;
  Candidates candidates_;
  simd::Momentum momentum_;
  uint32_t sure_ = kAllKeys + 1;  // keys from here on are written as sent
};

}  // namespace

size_t TopKScratchWords(const CodecSpec& spec, size_t numel) {
  return 3 * (Capacity(EntryCount(spec, numel), numel) + kSlack);
}

void EncodeTopK(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
                const EncodeExtras& extras) {
  Encoder(spec, gradient, residual, extras).Run(LayoutOf(spec, gradient.numel), wire);
}

}  // namespace thinwire
