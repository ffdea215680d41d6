// The search for the k largest. A threshold is guessed: the last step's, or one from a sample. One
// pass adds the residual and collects the elements that are not below it, the candidates. Whenever
// their buffer is full, all but the k largest are dropped and the threshold rises. If fewer than k
// were found, the threshold was too high, and further passes collect elements below it. So the
// result is exact whatever the guess was.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codecs/topk.h"
#include "compress/simd_kernels.h"

namespace thinwire::codecs {
namespace {

constexpr uint32_t kAllKeys = kAbsMask;  // the largest possible key

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

  // Makes room for `more` candidates, if necessary by KeepLargest. Returns the key that a further
  // element must reach to be among the k largest: of equal keys the lower index, which is already
  // here, wins.
  template <typename Dropped>
  uint32_t MakeRoom(size_t more, uint32_t low, uint32_t sure, Dropped dropped) {
    if (count_ + more <= capacity_) return low;
    return KeepLargest(0, sure, dropped) + 1;
  }

  // Keeps only the k largest, of equal ones the first; calls dropped(index, value) for each dropped
  // candidate with a key of at least `sure`. Returns the k-th key. `guess` as for FindKey.
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

  // The first candidate, from `from` on, whose index is at least `index`.
  size_t FirstFrom(size_t index, size_t from) const {
    const auto at = std::lower_bound(index_ + from, index_ + count_, index);
    return static_cast<size_t>(at - index_);
  }

  // Writes the entries of all candidates, and calls settle(index, rest) for each whose key is below
  // `sure` and that stores a residual; `rest` is what sending leaves. No candidates remain.
  template <typename Settle>
  void Encode(uint32_t sure, uint8_t* entries, Settle settle) {
    const uint32_t *index = index_, *bits = bits_;  // copies, which `settle` can't change
    const size_t unsure = simd::EncodeEntries(sure, index_, bits_, count_, entries);
    for (size_t i = 0; i < unsure; ++i) settle(index[i], FloatOf(bits[i]));
    count_ = 0;
  }

  // Drops the candidates from `from` on whose index is listed.
  void Forget(const std::vector<uint32_t>& indices, size_t from) {
    size_t kept = from;
    for (size_t i = from; i < count_; ++i) {
      if (std::binary_search(indices.begin(), indices.end(), index_[i])) continue;
      index_[kept] = index_[i];
      bits_[kept++] = bits_[i];
    }
    count_ = kept;
  }

  // Candidates [0, sorted) ascend, and so do the others; merges them so that all ascend.
  void Merge(size_t sorted) {
    std::vector<std::pair<uint32_t, uint32_t>> all(count_);
    for (size_t i = 0; i < count_; ++i) all[i] = {index_[i], bits_[i]};
    std::inplace_merge(all.begin(), all.begin() + static_cast<ptrdiff_t>(sorted), all.end());
    for (size_t i = 0; i < count_; ++i) std::tie(index_[i], bits_[i]) = all[i];
  }

 private:
  static constexpr size_t kSlack = 16;  // words that a vector may write after the last candidate

  // Candidates with the k-th key are dropped from this one on: only with ties do more than k have
  // that key or a larger one.
  size_t TiesEnd(const simd::RankedKey& last) const {
    size_t end = count_;
    for (size_t going = count_ - k_ - last.below; going > 0;) {
      --end;
      going -= (bits_[end] & kAbsMask) == last.key;
    }
    return end;
  }

  // There is always room for one more stage, so room need only be made between stages.
  static size_t Capacity(size_t k, size_t numel) {
    return std::min(numel, 3 * k + 2 * kStage) + kStage;
  }

  const size_t capacity_, k_;
  uint32_t* const index_;
  uint32_t* const bits_;
  uint32_t* const spare_;
  size_t count_ = 0;
};

constexpr size_t kSample = 4096;      // most elements; also at most an eighth of all
constexpr size_t kSampleFrom = 2048;  // elements; below that all are candidates
// Fractions of a threshold that was too high that are tried next, the closest first.
constexpr float kRetreat[] = {0.875f, 0.5f, 0.25f};

// Elements whose residual is still in the second-level cache after the selection.
constexpr size_t kNear = 65536;
// The k-th key very probably is below this multiple of the last one.
constexpr float kBorderGuess = 65.0f / 64;

class Encoder {
 public:
  Encoder(const CodecSpec& spec, const EncodeArgs& args, std::span<uint32_t> words)
      : gradient_(args.gradient),
        residual_(args.residual),
        threshold_(args.threshold),
        masks_(args.momentum.velocity != nullptr && spec.masking),
        k_(EntryCount(spec.density_ppm, gradient_.numel)),
        candidates_(words, k_, gradient_.numel),
        momentum_(args.momentum) {}

  // Corrects the residuals of candidates that were written as sent but are not.
  auto Restore() {
    return [r = residual_](size_t at, float x) {
      if (StoresResidual(x)) Put(r, at, x);
    };
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
    const uint32_t last = candidates_.KeepLargest(border_guess_, sure_, Restore());
    if (threshold_ != nullptr) *threshold_ = FloatOf(std::min(last, kHugeBits));
    Send(layout, wire);
  }

 private:
  bool WrittenAsSent(float x) const { return StoresResidual(x) && SelectionKey(x) >= sure_; }

  // Also sets the key from which elements are very probably sent: for large tensors, their residual
  // is written as if they were, while it is in cache, and corrected for the few that are not.
  uint32_t FirstGuess() {
    if (threshold_ != nullptr && *threshold_ != 0.0f) {
      if (residual_ != nullptr && gradient_.numel > kNear) sure_ = BitsOf(*threshold_);
      border_guess_ = BitsOf(*threshold_ * kBorderGuess);
      return CarriedKey(*threshold_);
    }
    return gradient_.numel < kSampleFrom ? 0 : SampledThreshold();
  }

  // Estimated from a jittered sample; low enough that k elements very probably reach it.
  uint32_t SampledThreshold() const {
    const size_t count = std::min(kSample, gradient_.numel / 8);
    const size_t stride = gradient_.numel / count;
    std::array<uint32_t, kSample + 16> sample, spare;
    for (size_t i = 0; i < count; ++i) {
      const size_t at = i * stride + i * 40503u % stride;
      float x;
      ToFloats(gradient_.Slice(at, 1), &x);
      if (residual_ != nullptr) x += Get<float>(residual_, at);
      if (momentum_.velocity != nullptr) x += momentum_.beta * Get<float>(momentum_.velocity, at);
      sample[i] = BitsOf(x);
    }
    const double expected =
        static_cast<double>(count) * static_cast<double>(k_) / static_cast<double>(gradient_.numel);
    const double generous = expected + 4 * std::sqrt(expected) + 4;
    if (generous >= static_cast<double>(count)) return 0;
    const size_t rank = count - static_cast<size_t>(generous);
    return std::min(simd::FindKey(sample.data(), count, rank, 0, spare.data()).key, kHugeBits);
  }

  // Stores x = g + r in the residual, and collects the candidates from `low` on.
  void Collect(uint32_t low) {
    ForEachStage(gradient_, [&](const float* g, size_t begin, size_t n) {
      low = std::min(candidates_.MakeRoom(n, low, sure_, Restore()),
                     kAllKeys);  // nothing exceeds the largest NaN
      const auto at = static_cast<uint32_t>(begin);
      uint32_t *index = candidates_.next_index(), *bits = candidates_.next_bits();
      if (residual_ == nullptr) {
        candidates_.Grow(simd::Scan(g, n, at, low, kAllKeys, index, bits));
        return;
      }
      // Elements that are not finite must be collected, since they leave their residual unchanged;
      // those that are not among the largest are dropped again.
      const simd::Thresholds keys{std::min(low, kHugeBits), std::max(low, sure_)};
      candidates_.Grow(
          simd::AddAndScan(g, residual_ + begin, momentum_.From(begin), n, at, keys, index, bits));
    });
  }

  // Rare, so it may allocate. The residual holds x now, except for elements that are not finite or
  // were written as sent; all of those are candidates already.
  void CollectBelow(uint32_t low, uint32_t highest) {
    const size_t found = candidates_.count();
    std::vector<uint32_t> seen;
    for (size_t i = 0; i < found; ++i) {
      const float x = candidates_.value(i);
      if (!StoresResidual(x) || WrittenAsSent(x)) seen.push_back(candidates_.index(i));
    }
    const TensorView x = residual_ == nullptr ? gradient_ : TensorView{residual_, gradient_.numel};
    ForEachStage(x, [&](const float* part, size_t begin, size_t n) {
      low = candidates_.MakeRoom(n, low, sure_, Restore());
      const size_t before = candidates_.count();
      candidates_.Grow(simd::Scan(part, n, static_cast<uint32_t>(begin), low, highest,
                                  candidates_.next_index(), candidates_.next_bits()));
      if (residual_ != nullptr && !seen.empty()) candidates_.Forget(seen, before);
    });
    candidates_.Merge(found);
  }

  void Send(const ShardLayout& layout, uint8_t* wire) {
    size_t sent = 0;
    for (size_t b = 0; b < layout.blocks; ++b) {
      const size_t begin = sent;
      sent = b + 1 == layout.blocks ? k_ : candidates_.FirstFrom((b + 1) * kSubBlock, begin);
      Put(wire, b, static_cast<uint32_t>(sent - begin));
    }
    if (masks_) MaskMomentum();
    candidates_.Encode(residual_ == nullptr ? 0 : sure_, wire + layout.codes_at,
                       [r = residual_](size_t at, float rest) { Put(r, at, rest); });
  }

  void MaskMomentum() {
    for (size_t i = 0; i < k_; ++i) {
      if (StoresResidual(candidates_.value(i))) Put(momentum_.velocity, candidates_.index(i), 0.0f);
    }
  }

  const TensorView gradient_;
  float* const residual_;
  float* const threshold_;
  const bool masks_;
  const size_t k_;
  Candidates candidates_;
  const Momentum momentum_;
  uint32_t border_guess_ = 0;
  uint32_t sure_ = kAllKeys + 1;  // keys from this one on are written as sent
};

// More than chunks of usual sizes need: 64 MiB.
constexpr size_t kKeptWords = size_t{1} << 24;

}  // namespace

void TopK::Encode(const CodecSpec& spec, const EncodeArgs& args) {
  const size_t numel = args.gradient.numel;
  const size_t words = Candidates::ScratchWords(EntryCount(spec.density_ppm, numel), numel);
  thread_local std::vector<uint32_t> kept;
  std::vector<uint32_t> large;
  std::vector<uint32_t>& scratch = words > kKeptWords ? large : kept;
  if (scratch.size() < words) scratch.resize(words);
  Encoder(spec, args, std::span(scratch).first(words)).Run(LayoutOf(spec, numel), args.wire);
}

}  // namespace thinwire::codecs
