// The options of int8 and int4 on top of the loops of simd_quantise-inl.h: stochastic rounding, and
// int4's Hadamard transform. Included once per target.
#if defined(THINWIRE_COMPRESS_SIMD_OPTIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_OPTIONS_INL_H_
#undef THINWIRE_COMPRESS_SIMD_OPTIONS_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_OPTIONS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "compress/element_math.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"
#include "compress/types.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The draws of stochastic rounding: compress/FORMAT.md.

// Philox's words of the even calls, or of the odd ones: each in the lower half of 64 bits, where a
// multiplication reads its operand and leaves its lower product. Upper halves are undefined.
using Wide = hn::RepartitionToWide<U>;
using Words = hn::Vec<Wide>;

HWY_INLINE Words ProductOf(Words word, uint32_t factor) {
  return hn::BitCast(Wide(), hn::MulEven(hn::BitCast(U(), word), hn::Set(U(), factor)));
}
HWY_INLINE Words InAll(uint32_t word) { return hn::BitCast(Wide(), hn::Set(U(), word)); }
HWY_INLINE Words UpperOf(Words product) { return hn::ShiftRight<32>(product); }

// The lower halves of both as the even and odd words of one vector; the same for upper halves.
HWY_INLINE hn::Vec<U> MergeLower(Words even, Words odd) {
  return hn::OddEven(hn::Shuffle2301(hn::BitCast(U(), odd)), hn::BitCast(U(), even));
}
HWY_INLINE hn::Vec<U> MergeUpper(Words even, Words odd) {
  return hn::OddEven(hn::BitCast(U(), odd), hn::Shuffle2301(hn::BitCast(U(), even)));
}

// The generator of element_math.h for a whole group of draws. Its calls differ only in the
// counter's first word, which counts up: so the first round's products are a sum and a scalar, and
// one of the second round's is a scalar.
class Generator {
 public:
  // The index of the word with an element's draw among those that Generate makes, for elements
  // counted from the first one of a group. Its draw is number place / kDrawLanes % 4 of the word.
  static constexpr size_t WordAt(size_t place) {
    return kDrawLanes * (place / (4 * kDrawLanes)) + place % kDrawLanes;
  }

  explicit HWY_INLINE Generator(const Draws& draws)
      : stream_low_(static_cast<uint32_t>(draws.stream)),
        stream_high_(static_cast<uint32_t>(draws.stream >> 32)) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      const uint32_t key0 = static_cast<uint32_t>(draws.key) + round * kPhiloxWeyl[0],
                     key1 = static_cast<uint32_t>(draws.key >> 32) + round * kPhiloxWeyl[1];
      std::fill_n(key0_[round], kKeyLanes, key0);
      std::fill_n(key1_[round], kKeyLanes, key1);
    }
  }

  // The words of the group that begins at element `first`.
  HWY_INLINE void Generate(uint64_t first, uint32_t* HWY_RESTRICT out) const {
    const uint64_t counter = first / kDrawGroup * kDrawLanes;
    Alike alike;
    alike.product = uint64_t{kPhiloxMul[0]} * static_cast<uint32_t>(counter);
    const uint64_t p1 = uint64_t{kPhiloxMul[1]} * stream_low_;
    const uint32_t word0 =
        static_cast<uint32_t>(p1 >> 32) ^ static_cast<uint32_t>(counter >> 32) ^ key0_[0][0];
    const uint64_t p0 = uint64_t{kPhiloxMul[0]} * word0;
    alike.round1 = stream_high_ ^ key1_[0][0];
    alike.round2[0] = static_cast<uint32_t>(p1) ^ key0_[1][0];
    alike.round2[1] = static_cast<uint32_t>(p0 >> 32) ^ key1_[1][0];
    alike.round3 = static_cast<uint32_t>(p0) ^ key1_[2][0];
    for (size_t lane = 0; lane < kDrawLanes; lane += kLanes) GenerateLanes(alike, lane, out + lane);
  }

 private:
  // The state that all calls of a group share.
  struct Alike {
    uint64_t product;    // for the first call's counter
    uint32_t round1;     // added to word 2
    uint32_t round2[2];  // added to words 0 and 2
    uint32_t round3;     // added to word 2
  };
  struct State {
    State() {}  // NEON's compiler gives an implicit one no instruction set
    Words word[4];
  };

  // The words after the third round. `products`: for the lanes' calls.
  HWY_INLINE State Begin(const Alike& alike, const uint64_t* HWY_RESTRICT products) const {
    const Words p = hn::Add(hn::LoadU(Wide(), products), hn::Set(Wide(), alike.product));
    const Words p1 = ProductOf(hn::Xor(UpperOf(p), InAll(alike.round1)), kPhiloxMul[1]);
    const Words word0 = hn::Xor(UpperOf(p1), InAll(alike.round2[0]));
    const Words word2 = hn::Xor(p, InAll(alike.round2[1]));
    State s;
    s.word[1] = ProductOf(word2, kPhiloxMul[1]);
    s.word[3] = ProductOf(word0, kPhiloxMul[0]);
    s.word[0] = hn::Xor3(UpperOf(s.word[1]), p1, Key(key0_[2]));
    s.word[2] = hn::Xor(UpperOf(s.word[3]), InAll(alike.round3));
    return s;
  }

  static HWY_INLINE hn::Vec<U> InLanes(const uint32_t* key) {
    if constexpr (kKeyLanes == 1) return hn::Set(U(), *key);
    return hn::Load(U(), key);
  }
  static HWY_INLINE Words Key(const uint32_t* lanes) { return hn::BitCast(Wide(), InLanes(lanes)); }

  HWY_INLINE void Round(State& s, int round) const {
    const Words p0 = ProductOf(s.word[0], kPhiloxMul[0]), p1 = ProductOf(s.word[2], kPhiloxMul[1]);
    s.word[0] = hn::Xor3(UpperOf(p1), s.word[1], Key(key0_[round]));
    s.word[1] = p1;
    s.word[2] = hn::Xor3(UpperOf(p0), s.word[3], Key(key1_[round]));
    s.word[3] = p0;
  }

  // Calls `lane` to lane + kLanes - 1 of the group. The last round merges even and odd calls.
  HWY_INLINE void GenerateLanes(const Alike& alike, size_t lane, uint32_t* HWY_RESTRICT out) const {
    constexpr uint64_t kFactor = kPhiloxMul[0];
    alignas(64) static constexpr uint64_t kEven[kDrawLanes / 2] = {
        0,           2 * kFactor,  4 * kFactor,  6 * kFactor,
        8 * kFactor, 10 * kFactor, 12 * kFactor, 14 * kFactor};
    alignas(64) static constexpr uint64_t kOdd[kDrawLanes / 2] = {
        kFactor,     3 * kFactor,  5 * kFactor,  7 * kFactor,
        9 * kFactor, 11 * kFactor, 13 * kFactor, 15 * kFactor};
    constexpr int kLast = kPhiloxRounds - 1;
    State even = Begin(alike, kEven + lane / 2), odd = Begin(alike, kOdd + lane / 2);
#pragma GCC unroll 10
    for (int round = 3; round < kLast; ++round) {
      Round(even, round);
      Round(odd, round);
    }
    const Words e0 = ProductOf(even.word[0], kPhiloxMul[0]),
                o0 = ProductOf(odd.word[0], kPhiloxMul[0]),
                e1 = ProductOf(even.word[2], kPhiloxMul[1]),
                o1 = ProductOf(odd.word[2], kPhiloxMul[1]);
    const auto store = [out](size_t word, hn::Vec<U> v)
                           HWY_ATTR { hn::Store(v, U(), out + kDrawLanes * word); };
    store(0, hn::Xor3(MergeUpper(e1, o1), MergeLower(even.word[1], odd.word[1]),
                      InLanes(key0_[kLast])));
    store(1, MergeLower(e1, o1));
    store(2, hn::Xor3(MergeUpper(e0, o0), MergeLower(even.word[3], odd.word[3]),
                      InLanes(key1_[kLast])));
    store(3, MergeLower(e0, o0));
  }

  const uint32_t stream_low_, stream_high_;
  // By round. Keys repeated in each lane are operands from memory, which occupy none of AVX2's few
  // registers; AVX-512 has enough, and its loads take longer.
  static constexpr size_t kKeyLanes = kLanes >= 16 ? 1 : kLanes;
  alignas(64) uint32_t key0_[kPhiloxRounds][kKeyLanes], key1_[kPhiloxRounds][kKeyLanes];
};

// scaled + UniformOf(draw), with draw `turn` (0 to 3) of each word. The number and its product with
// 2^-24 are exact, so there is one rounding, fused or not.
HWY_INLINE V AddUniform(V scaled, hn::Vec<U> words, size_t turn) {
  // The draw's two bytes in the middle of a word whose other bytes are 0.
  constexpr auto kNone = uint8_t{0x80};
  alignas(64) static constexpr uint8_t kMiddle[4][16] = {
      {kNone, 0, 1, kNone, kNone, 4, 5, kNone, kNone, 8, 9, kNone, kNone, 12, 13, kNone},
      {kNone, 1, 2, kNone, kNone, 5, 6, kNone, kNone, 9, 10, kNone, kNone, 13, 14, kNone},
      {kNone, 2, 3, kNone, kNone, 6, 7, kNone, kNone, 10, 11, kNone, kNone, 14, 15, kNone},
      {kNone, 3, 0, kNone, kNone, 7, 4, kNone, kNone, 11, 8, kNone, kNone, 15, 12, kNone}};
  const auto bytes = hn::LoadDup128(U8(), kMiddle[turn]);
  const auto half = hn::Set(U(), 0x80);
#if HWY_TARGET == HWY_AVX3
  const hn::Vec<I> number{
      _mm512_mask_shuffle_epi8(half.raw, 0x6666666666666666u, words.raw, bytes.raw)};
#else
  const auto draws = hn::BitCast(U(), hn::TableLookupBytesOr0(hn::BitCast(U8(), words), bytes));
  const auto number = hn::BitCast(I(), hn::Or(draws, half));
#endif
  return hn::MulAdd(hn::ConvertTo(F(), number), hn::Set(F(), 0x1p-24f), scaled);
}

// Rounds up with the probability of the fraction.
template <int kBits>
class Stochastic {
 public:
  // The state for one block.
  class Block {
   public:
    explicit HWY_INLINE Block(const uint32_t* words) : words_(words) {}

    HWY_INLINE Codes Of(size_t j, V scaled) const {
      const size_t place = kLanes * j;
      const auto words = hn::Load(U(), words_ + Generator::WordAt(place));
      V value = hn::Floor(AddUniform(scaled, words, place / kDrawLanes % 4));
      // |scaled| is at most qmax plus a rounding error, which is less than u's distance from 0 and
      // 1 except for int8: there the sum may round to 128.
      if constexpr (kBits == 8) value = hn::Min(value, hn::Set(F(), 127.0f));
      return {RoundToInt(value), value};
    }

   private:
    const uint32_t* words_;
  };

  HWY_INLINE Stochastic(const Draws& draws, size_t block)
      : generator_(draws), first_(draws.first), block_(block) {}

  HWY_INLINE void Prepare(size_t b) {
    const uint64_t first = FirstOf(b), group = first - first % kDrawGroup;
    generator_.Generate(group, words_[b % 2]);
    if (HWY_UNLIKELY(block_ > kDrawGroup)) GenerateRest(group, words_[b % 2]);
  }

  HWY_INLINE Block ForBlock(size_t b) const {
    return Block(words_[b % 2] + Generator::WordAt(FirstOf(b) % kDrawGroup));
  }

 private:
  // A block starts at the beginning or at the middle of a group of draws.
  HWY_INLINE uint64_t FirstOf(size_t b) const { return first_ + block_ * b; }

  HWY_NOINLINE void GenerateRest(uint64_t group, uint32_t* words) const {
    for (size_t i = kDrawGroup; i < block_; i += kDrawGroup) {
      generator_.Generate(group + i, words + Generator::WordAt(i));
    }
  }

  const Generator generator_;
  const uint64_t first_;
  const size_t block_;
  alignas(64) uint32_t words_[2][Generator::WordAt(kMaxBlock)];
};

// Blocks that go through the Hadamard transform, in a buffer.

// Rounds values that may exceed int4's codes. `Rounding`: that of one block.
template <class Rounding>
class Clamped {
 public:
  explicit HWY_INLINE Clamped(Rounding rounding) : rounding_(rounding) {}
  HWY_INLINE Codes Of(size_t j, V scaled) const {
    const V top = hn::Set(F(), 7.0f);
    return rounding_.Of(j, hn::Min(hn::Max(scaled, hn::Neg(top)), top));
  }

 private:
  const Rounding rounding_;
};

// One butterfly with a stride below the vector's length: the partner, plus or minus the lane's own
// value.
template <size_t kStride>
HWY_INLINE V ButterflyWithin(V v) {
  alignas(64) uint32_t minus[kLanes];
  for (size_t i = 0; i < kLanes; ++i) minus[i] = i & kStride ? ~kAbsMask : 0;
  const V own = hn::Xor(v, hn::BitCast(F(), hn::Load(U(), minus)));
  if constexpr (kStride == 1) return hn::Add(hn::Shuffle2301(v), own);
  if constexpr (kStride == 2) return hn::Add(hn::Shuffle1032(v), own);
  if constexpr (kStride == 4) return hn::Add(hn::SwapAdjacentBlocks(v), own);
  if constexpr (kStride == 8) return hn::Add(hn::ConcatLowerUpper(F(), v, v), own);
}

// Butterflies of element_math.h on 256 aligned floats.
HWY_INLINE void ButterfliesOf(float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    V v = ButterflyWithin<2>(ButterflyWithin<1>(hn::Load(F(), x + i)));
    if constexpr (kLanes >= 8) v = ButterflyWithin<4>(v);
    if constexpr (kLanes >= 16) v = ButterflyWithin<8>(v);
    hn::Store(v, F(), x + i);
  }
  for (size_t stride = kLanes; stride < kTransform; stride *= 2) {
    for (size_t begin = 0; begin < kTransform; begin += 2 * stride) {
      for (size_t i = begin; i < begin + stride; i += kLanes) {
        const V a = hn::Load(F(), x + i), b = hn::Load(F(), x + i + stride);
        hn::Store(hn::Add(a, b), F(), x + i);
        hn::Store(hn::Sub(a, b), F(), x + i + stride);
      }
    }
  }
}

HWY_INLINE void MultiplyBy(const float* HWY_RESTRICT factors, float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(F(), x + i), hn::Load(F(), factors + i)), F(), x + i);
  }
}

// Encodes blocks of 256 in 4 bits after the transform.
template <bool kFeedback, class Rounding>
HWY_INLINE void EncodeTransformed(const Blocks& blocks, Rounding& rounding,
                                  const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                  uint8_t* HWY_RESTRICT scales, uint8_t* HWY_RESTRICT codes) {
  constexpr size_t kCount = kTransform / kLanes;
  alignas(64) float buffer[kTransform];
  const auto in_buffer = [&](size_t j) HWY_ATTR { return hn::Load(F(), buffer + kLanes * j); };
  for (size_t b = 0; b < blocks.count; ++b, g += kTransform, r += kFeedback ? kTransform : 0) {
    uint8_t* scale = scales + 2 * b;
    uint8_t* to = codes + kTransform / 2 * b;
    PrefetchBlock(g, kTransform * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r, kTransform * sizeof(float));
    for (size_t j = 0; j < kTransform; j += kLanes) {
      hn::Store(LoadX<kFeedback>(g, r, j), F(), buffer + j);
    }
    MultiplyBy(blocks.signs, buffer);
    ButterfliesOf(buffer);
    BlockScale s = HeadOf<4>(kCount, kTransform, in_buffer);
    const uint32_t magnitude = TransformedMagnitude(s.magnitude());
    if (HWY_UNLIKELY(IsSpecial(magnitude))) {
      EncodeSpecial<4, kFeedback>(kCount, magnitude, g, r, scale, to);
      continue;
    }
    const float clipped = kClip * FloatOf(magnitude);
    s = ScaleFor<4>(hn::BitCast(I(), hn::Set(F(), clipped)));
    StoreScale(s.scale, scale);
    rounding.Prepare(b);
    QuantiseBlock<4>(kCount, s, Clamped(rounding.ForBlock(b)), in_buffer, to,
                     [&](size_t j, V, V code)
                         HWY_ATTR { hn::Store(hn::Mul(code, s.scale), F(), buffer + kLanes * j); });
    if constexpr (!kFeedback) continue;
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < kTransform; j += kLanes) {
      const V x = LoadX<true>(g, r, j);
      hn::StoreU(hn::Sub(x, hn::Load(F(), buffer + j)), F(), r + j);
    }
  }
}

// Decodes blocks of 256 and undoes the transform.
template <To kTo>
HWY_INLINE void DecodeTransformed(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                                  const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  alignas(64) float buffer[kTransform];
  for (size_t b = 0; b < blocks.count; ++b, out += kTransform, codes += kTransform / 2) {
    const Blocks one{.bits = 4, .block = kTransform, .count = 1, .filled = kTransform};
    if (HWY_UNLIKELY(!IsTransformed(LoadScale(scales + 2 * b)))) {
      DecodeLoop<4, kTo>(one, scales + 2 * b, codes, out);
      continue;
    }
    DecodeLoop<4, To::kOut>(one, scales + 2 * b, codes, buffer);
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < kTransform; j += kLanes) {
      V value = hn::Load(F(), buffer + j);
      if constexpr (kTo == To::kSum) value = hn::Add(hn::LoadU(F(), out + j), value);
      hn::StoreU(value, F(), out + j);
    }
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_OPTIONS_INL_H_
