// topk's passes over a stage of elements, and its operations on the candidates of a whole tensor.
// Included once per target.
#if defined(THINWIRE_COMPRESS_SIMD_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#undef THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "compress/codecs/topk.h"
#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"
#include "compress/types.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A pass marks elements in words, one bit each, and then reads the indices of the set bits. Neither
// step branches on the data: hits are so frequent that mispredicted branches would cost more than
// the vectors without a hit (decision 10).
inline constexpr size_t kWord = 64;
inline constexpr size_t kWordVectors = kWord / kLanes;

// The candidates that a pass found. Element i of the pass has index `begin` + i in the tensor.
struct Found {
  uint32_t* HWY_RESTRICT index;
  uint32_t* HWY_RESTRICT bits;
  uint32_t begin;
  size_t count = 0;

  // For countr_zero, where GCC would branch unpredictably on whether a word is empty.
  static constexpr uint64_t kLastBit = uint64_t{1} << 63;

  // Appends elements i + b for all set bits b. Four at a time are written, whether set or not: few
  // words have more, so that the number of iterations is well predicted.
  HWY_INLINE void AppendPlaces(uint64_t word, size_t i) {
    const size_t end = count + static_cast<size_t>(std::popcount(word));
    const uint32_t first = begin + static_cast<uint32_t>(i);
    do {
#pragma GCC unroll 4
      for (size_t t = 0; t < 4; ++t) {
        index[count + t] = first + static_cast<uint32_t>(std::countr_zero(word | kLastBit));
        word &= word - 1;
      }
      count += 4;
    } while (HWY_UNLIKELY(count < end));
    count = end;
  }
  HWY_INLINE void Append(float x, size_t i) {
    bits[count] = BitsOf(x);
    index[count++] = begin + static_cast<uint32_t>(i);
  }
  size_t PlaceOf(size_t candidate) const { return index[candidate] - begin; }
};

// AddAndScan on single elements [i, end); returns the new count. (`found` is passed by value, so
// that the vector loop keeps its own in registers.)
template <bool kMomentum>
HWY_NOINLINE size_t AddAndScanElements(const float* g, float* r, const Momentum& momentum, size_t i,
                                       size_t end, const Thresholds& keys, Found found) {
  for (; i < end; ++i) {
    float gradient = Get<float>(g, i), speed = 0;
    if constexpr (kMomentum) {
      speed = momentum.beta * Get<float>(momentum.velocity, i) + gradient;
      gradient = momentum.nesterov ? gradient + momentum.beta * speed : speed;
    }
    float x = Get<float>(r, i) + gradient;
    if (SelectionKey(x) >= keys.low) found.Append(x, i);
    if (!StoresResidual(x)) continue;
    if (SelectionKey(x) >= keys.sure) x = x - thinwire::FromBf16(thinwire::ToBf16(x));
    Put(r, i, x);
    if constexpr (kMomentum) Put(momentum.velocity, i, speed);
  }
  return found.count;
}

// One bit for each lane of a word's vectors that is found.
HWY_INLINE uint64_t MarksOf(const hn::Mask<I>* found) {
  uint64_t marks = 0;
#if HWY_TARGET == HWY_AVX3
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    StoreBits(hn::RebindMask(F(), found[t]), reinterpret_cast<uint8_t*>(&marks), t);
  }
#else
  // Packed to bytes first, four vectors give their bits in one step.
  const hn::Repartition<int8_t, I> d8;
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; t += 4) {
    hn::Vec<I> four[4];
    for (size_t j = 0; j < 4; ++j) four[j] = hn::VecFromMask(I(), found[t + j]);
    uint64_t bits = 0;
    hn::StoreMaskBits(d8, hn::MaskFromVec(hn::BitCast(d8, ToBytes(four))),
                      reinterpret_cast<uint8_t*>(&bits));
    marks |= bits << (kLanes * t);
  }
#endif
  return marks;
}

// r = x for the kWord elements from i on, and a mark for each key above `below`. Returns false and
// stores nothing if one of them is not finite.
template <bool kMomentum>
HWY_INLINE bool AddWord(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                        const Momentum& momentum, hn::Vec<I> below, size_t i,
                        uint64_t* HWY_RESTRICT marks) {
  const F d;
  const V beta = hn::Set(d, momentum.beta);
  V x[kWordVectors], speed[kWordVectors];
  hn::Mask<I> found[kWordVectors];
  auto largest = hn::Zero(I());
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    const size_t at = i + kLanes * t;
    x[t] = hn::LoadU(d, g + at);
    if constexpr (kMomentum) {
      speed[t] = hn::Add(hn::Mul(beta, hn::LoadU(d, momentum.velocity + at)), x[t]);
      x[t] = momentum.nesterov ? hn::Add(x[t], hn::Mul(beta, speed[t])) : speed[t];
    }
    x[t] = hn::Add(hn::LoadU(d, r + at), x[t]);
    const auto key = Magnitude(x[t]);
    largest = hn::Max(largest, key);
    found[t] = hn::Gt(key, below);
  }
  *marks = MarksOf(found);
  const auto huge = hn::Set(I(), static_cast<int32_t>(kHugeBits));
  if (HWY_UNLIKELY(!hn::AllTrue(I(), hn::Lt(largest, huge)))) return false;
#pragma GCC unroll 16
  for (size_t t = 0; t < kWordVectors; ++t) {
    hn::StoreU(x[t], d, r + i + kLanes * t);
    if constexpr (kMomentum) hn::StoreU(speed[t], d, momentum.velocity + i + kLanes * t);
  }
  return true;
}

// Reads the values of a stage's candidates, from `from` on, from r, and stores there what sending
// leaves of the sure ones. Without branches on which ones are sure: all are stored.
HWY_INLINE void TakeValues(float* r, uint32_t sure, size_t from, const Found& found) {
  const size_t count = found.count - from;
  const uint32_t begin = found.begin;
  const uint32_t* HWY_RESTRICT index = found.index + from;
  uint32_t* HWY_RESTRICT bits = found.bits + from;
  for (size_t c = 0; c < count; ++c) bits[c] = Get<uint32_t>(r, index[c] - begin);
  if (sure > kAbsMask) return;
  const auto below = hn::Set(I(), static_cast<int32_t>(sure) - 1);
  alignas(64) float left[kStage + kLanes];
  for (size_t c = 0; c < count; c += kLanes) {
    const V x = hn::BitCast(F(), hn::LoadU(U(), bits + c));
    const auto sent = hn::BitCast(F(), hn::ShiftLeft<16>(Bf16Bits(x)));
    const auto is_sure = hn::RebindMask(F(), hn::Gt(Magnitude(x), below));
    hn::Store(hn::Sub(x, hn::IfThenElseZero(is_sure, sent)), F(), left + c);
  }
  for (size_t c = 0; c < count; ++c) Put(r, index[c] - begin, left[c]);
}

template <bool kMomentum>
HWY_INLINE size_t AddAndScanLoop(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                 const Momentum& momentum, size_t n, const Thresholds& keys,
                                 Found found) {
  const auto below = hn::Set(I(), static_cast<int32_t>(keys.low) - 1);
  const size_t words = n / kWord;
  size_t taken = 0;
  for (size_t w = 0; w < words; ++w) {
    const size_t i = w * kWord;
    PrefetchBlock(g + i, kWord * sizeof(float));
    PrefetchBlock(r + i, kWord * sizeof(float));
    if constexpr (kMomentum) PrefetchBlock(momentum.velocity + i, kWord * sizeof(float));
    uint64_t marks = 0;
    if (HWY_LIKELY(AddWord<kMomentum>(g, r, momentum, below, i, &marks))) {
      found.AppendPlaces(marks, i);
      continue;
    }
    TakeValues(r, keys.sure, taken, found);
    found.count = AddAndScanElements<kMomentum>(g, r, momentum, i, i + kWord, keys, found);
    taken = found.count;
  }
  TakeValues(r, keys.sure, taken, found);
  return AddAndScanElements<kMomentum>(g, r, momentum, words * kWord, n, keys, found);
}

size_t AddAndScanT(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                   const Thresholds& keys, uint32_t* index, uint32_t* bits) {
  const Found found{index, bits, begin};
  return momentum.velocity != nullptr ? AddAndScanLoop<true>(g, r, momentum, n, keys, found)
                                      : AddAndScanLoop<false>(g, r, momentum, n, keys, found);
}

size_t ScanT(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
             uint32_t* index, uint32_t* bits) {
  const F d;
  const auto below = hn::Set(I(), static_cast<int32_t>(low) - 1);
  const auto above = hn::Set(I(), static_cast<int32_t>(highest));
  Found found{index, bits, begin};
  const size_t words = n / kWord;
  for (size_t w = 0; w < words; ++w) {
    PrefetchBlock(x + w * kWord, kWord * sizeof(float));
    uint64_t marks = 0;
#pragma GCC unroll 16
    for (size_t t = 0; t < kWordVectors; ++t) {
      const auto key = Magnitude(hn::LoadU(d, x + w * kWord + kLanes * t));
      const auto hit = hn::AndNot(hn::Gt(key, above), hn::Gt(key, below));
      StoreBits(hn::RebindMask(d, hit), reinterpret_cast<uint8_t*>(&marks), t);
    }
    found.AppendPlaces(marks, w * kWord);
  }
  for (size_t c = 0; c < found.count; ++c) found.bits[c] = Get<uint32_t>(x, found.PlaceOf(c));
  for (size_t i = words * kWord; i < n; ++i) {
    const float value = Get<float>(x, i);
    const uint32_t key = SelectionKey(value);
    if (key >= low && key <= highest) found.Append(value, i);
  }
  return found.count;
}

// Operations on candidates.

// The lanes of the vector at element i that are below `end`.
HWY_INLINE hn::Mask<I> Before(size_t i, size_t end) {
  return hn::FirstN(I(), i < end ? std::min(end - i, kLanes) : 0);
}

HWY_INLINE hn::Vec<I> KeysAt(const uint32_t* bits, size_t i) {
  return Magnitude(hn::BitCast(F(), hn::LoadU(U(), bits + i)));
}

HWY_INLINE hn::Vec<I> SetKey(uint32_t key) { return hn::Set(I(), static_cast<int32_t>(key)); }

#if HWY_TARGET != HWY_AVX3
// For each mask of a vector the numbers of the set lanes, in order. (GCC copies Highway's own table
// to the stack wherever it inlines it, which takes longer than all the rest.)
struct SetLanes {
  uint8_t of[size_t{1} << kLanes][kLanes];
};
constexpr SetLanes ListSetLanes() {
  SetLanes lanes{};
  for (size_t mask = 0; mask < size_t{1} << kLanes; ++mask) {
    for (size_t lane = 0, set = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) lanes.of[mask][set++] = static_cast<uint8_t>(lane);
    }
  }
  return lanes;
}
inline constexpr SetLanes kSetLanes = ListSetLanes();
#endif

// The lanes of a mask that are appended to arrays. Whole vectors are stored, since partial stores
// are slow on Zen 4 (decision 10).
class Chosen {
 public:
  template <class M>
  explicit HWY_INLINE Chosen(M mask) : mask_(hn::RebindMask(U(), mask)) {
#if HWY_TARGET == HWY_AVX3
    count_ = hn::CountTrue(U(), mask_);
#else
    uint8_t bits[8] = {};
    hn::StoreMaskBits(U(), mask_, bits);
    count_ = static_cast<size_t>(std::popcount(bits[0]));
    const hn::Rebind<uint8_t, I> d8;
    order_ = hn::PromoteTo(I(), hn::LoadU(d8, kSetLanes.of[bits[0]]));
#endif
  }

  size_t count() const { return count_; }

  HWY_INLINE void Append(hn::Vec<U> v, uint32_t* to) const {
#if HWY_TARGET == HWY_AVX3
    hn::StoreU(hn::Compress(v, mask_), U(), to);
#else
    hn::StoreU(hn::TableLookupLanes(v, hn::IndicesFromVec(U(), order_)), U(), to);
#endif
  }

 private:
  hn::Mask<U> mask_;
#if HWY_TARGET != HWY_AVX3
  hn::Vec<I> order_;
#endif
  size_t count_;
};

// Keys in memory; the last vector is padded with kAbsMask: no key is larger.
class KeyList {
 public:
  HWY_INLINE KeyList(const uint32_t* bits, size_t count, uint32_t* to) : keys_(to), count_(count) {
    auto lowest = SetKey(kAbsMask), highest = hn::Zero(I());
    for (size_t i = 0; i < count; i += kLanes) {
      const auto valid = Before(i, count);
      const auto key = KeysAt(bits, i);
      const auto filled = hn::IfThenElse(valid, key, SetKey(kAbsMask));
      Store(filled, i);
      lowest = hn::Min(lowest, filled);
      highest = hn::Max(highest, hn::IfThenElseZero(valid, key));
    }
    lowest_ = static_cast<uint32_t>(hn::GetLane(hn::MinOfLanes(I(), lowest)));
    highest_ = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I(), highest)));
  }

  size_t count() const { return count_; }
  uint32_t lowest() const { return lowest_; }
  uint32_t highest() const { return highest_; }

  HWY_INLINE size_t CountBelow(uint32_t key) const {
    const auto border = SetKey(key);
    size_t below = 0;
    for (size_t i = 0; i < count_; i += kLanes) {
      below += hn::CountTrue(I(), hn::Lt(Load(i), border));
    }
    return below;
  }

  // Keeps the `count` keys below `key`, or those that are not below it.
  template <bool kBelow>
  HWY_INLINE void Keep(uint32_t key, size_t count) {
    const auto border = SetKey(key);
    size_t kept = 0;
    for (size_t i = 0; i < count_; i += kLanes) {
      const auto keys = Load(i);
      const auto below = hn::Lt(keys, border);
      const Chosen chosen(kBelow ? below : hn::Not(below));
      chosen.Append(hn::BitCast(U(), keys), keys_ + kept);
      kept += chosen.count();
    }
    count_ = count;
    Store(SetKey(kAbsMask), count);
  }

  // The key of rank `rank` among at most one vector of keys: each is compared with all, without
  // branches.
  HWY_INLINE RankedKey FindInVector(size_t rank) const {
    const auto all = Load(0);
    RankedKey found{};
    for (size_t i = 0; i < count_; ++i) {
      const auto key = SetKey(keys_[i]);
      const size_t below = hn::CountTrue(I(), hn::Lt(all, key));
      const size_t equal = hn::CountTrue(I(), hn::Eq(all, key));
      const bool is = (below <= rank) & (rank < below + equal);
      found.key = is ? keys_[i] : found.key;
      found.below = is ? below : found.below;
    }
    return found;
  }

 private:
  HWY_INLINE hn::Vec<I> Load(size_t i) const { return hn::BitCast(I(), hn::LoadU(U(), keys_ + i)); }
  HWY_INLINE void Store(hn::Vec<I> keys, size_t i) {
    hn::StoreU(hn::BitCast(U(), keys), U(), keys_ + i);
  }

  uint32_t* keys_;
  size_t count_;
  uint32_t lowest_, highest_;
};

// Bisects the range of keys until one vector of them is left.
RankedKey FindKeyT(const uint32_t* bits, size_t count, size_t rank, uint32_t guess,
                   uint32_t* spare) {
  KeyList list(bits, count, spare);
  uint32_t from = list.lowest(), end = list.highest() + 1;  // where the key is
  size_t below = 0;                                         // keys below `from`
  while (list.count() > kLanes && end - from > 1) {
    const bool inside = guess > from && guess < end;
    const uint32_t middle = inside ? guess : from + (end - from) / 2;
    guess = 0;
    const size_t less = list.CountBelow(middle);
    if (rank < below + less) {
      list.Keep<true>(middle, less);
      end = middle;
    } else {
      list.Keep<false>(middle, list.count() - less);
      below += less;
      from = middle;
    }
  }
  if (end - from <= 1) return {from, below};
  const RankedKey found = list.FindInVector(rank - below);
  return {found.key, found.below + below};
}

// The candidates from i on that are within the border.
HWY_INLINE hn::Mask<I> Within(const Border& border, hn::Vec<I> keys, size_t i) {
  const auto least =
      hn::IfThenElse(Before(i, border.ties_end), SetKey(border.key - 1), SetKey(border.key));
  return hn::Gt(keys, least);
}

size_t FindBeyondT(const Border& border, uint32_t low, const uint32_t* bits, size_t count,
                   uint32_t* places) {
  size_t found = 0;
  const auto below_low = hn::Set(I(), static_cast<int32_t>(low) - 1);
  auto place = hn::Iota(U(), 0);
  for (size_t i = 0; i < count; i += kLanes) {
    const auto keys = KeysAt(bits, i);
    const auto listed = hn::And(hn::Gt(keys, below_low), Before(i, count));
    const Chosen chosen(hn::AndNot(Within(border, keys, i), listed));
    chosen.Append(place, places + found);
    found += chosen.count();
    place = hn::Add(place, hn::Set(U(), kLanes));
  }
  return found;
}

size_t KeepWithinT(const Border& border, uint32_t* index, uint32_t* bits, size_t count) {
  size_t kept = 0;
  for (size_t i = 0; i < count; i += kLanes) {
    const auto at = hn::LoadU(U(), index + i), x = hn::LoadU(U(), bits + i);
    const auto keys = Magnitude(hn::BitCast(F(), x));
    const Chosen chosen(hn::And(Within(border, keys, i), Before(i, count)));
    chosen.Append(at, index + kept);
    chosen.Append(x, bits + kept);
    kept += chosen.count();
  }
  return kept;
}

size_t EncodeEntriesT(uint32_t sure, uint32_t* index, uint32_t* bits, size_t count,
                      uint8_t* entries) {
  size_t unsure = 0;
  const auto end = SetKey(std::min(sure, kHugeBits));
  for (size_t i = 0; i < count; i += kLanes) {
    const auto at = hn::LoadU(U(), index + i);
    const V x = hn::BitCast(F(), hn::LoadU(U(), bits + i));
    const auto high = hn::ShiftLeft<16>(Bf16Bits(x));
    const auto entry = hn::BitCast(U8(), hn::Or(high, hn::And(at, hn::Set(U(), kSubBlock - 1))));
    if (HWY_LIKELY(i + kLanes <= count)) {
      hn::StoreU(entry, U8(), entries + sizeof(uint32_t) * i);
    } else {
      alignas(64) uint8_t last[sizeof(uint32_t) * kLanes];
      hn::Store(entry, U8(), last);
      memcpy(entries + sizeof(uint32_t) * i, last, sizeof(uint32_t) * (count - i));
    }
    const Chosen chosen(hn::And(hn::Lt(Magnitude(x), end), Before(i, count)));
    chosen.Append(at, index + unsure);
    chosen.Append(hn::BitCast(U(), hn::Sub(x, hn::BitCast(F(), high))), bits + unsure);
    unsure += chosen.count();
  }
  return unsure;
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_TOPK_INL_H_
