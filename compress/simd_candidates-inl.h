// Operations of topk on the candidates of a whole tensor. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_CANDIDATES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_CANDIDATES_INL_H_
#undef THINWIRE_COMPRESS_SIMD_CANDIDATES_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_CANDIDATES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "compress/codecs/topk.h"
#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The first of the elements from i on that are below `end`; none if there are none.
HWY_INLINE hn::Mask<I> Before(size_t i, size_t end) {
  return hn::FirstN(I(), i < end ? std::min(end - i, kLanes) : 0);
}

HWY_INLINE hn::Vec<I> KeysAt(const uint32_t* bits, size_t i) {
  return Magnitude(hn::BitCast(F(), hn::LoadU(U(), bits + i)));
}

HWY_INLINE hn::Vec<I> SetKey(uint32_t key) { return hn::Set(I(), static_cast<int32_t>(key)); }

#if HWY_TARGET != HWY_AVX3
// For each mask of a vector the numbers of the lanes that are set, in order. (Highway's own table
// is copied to the stack wherever GCC inlines it, which takes longer than all the rest.)
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

// The lanes of a mask that are to be appended to arrays. Whole vectors are stored: storing a part
// of one takes Zen 4 about 100 cycles.
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

// Keys in memory, of which the last vector is filled up with kAllKeys: no key is larger.
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

  // Keeps the `count` keys below `key`, or those from it on.
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

  // The key of rank `rank` of at most a vector's: each is compared with all, without branches.
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

// Halves the range of keys until a vector of them is left.
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

// Which of the candidates from i on are on the near side of the border.
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

#endif  // THINWIRE_COMPRESS_SIMD_CANDIDATES_INL_H_
