// How scaled elements become codes. Included once for each target.
//
// A rounding's Prepare(b) comes any time before the codes of block b, but after those of block
// b - 2; ForBlock(b) gives what rounds the block, whose Of(j, scaled) gives the codes of vector j.
#if defined(THINWIRE_COMPRESS_SIMD_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_ROUNDING_INL_H_
#undef THINWIRE_COMPRESS_SIMD_ROUNDING_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_ROUNDING_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/codec_traits.h"
#include "compress/philox.h"
#include "compress/simd_draws-inl.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

struct Codes {
  hn::Vec<I> whole;
  V value;  // the same numbers
};

class ToNearest {
 public:
  HWY_INLINE void Prepare(size_t) {}
  HWY_INLINE ToNearest ForBlock(size_t) const { return *this; }
  HWY_INLINE Codes Of(size_t, V scaled) const {
    const auto whole = RoundToInt(scaled);
    return {whole, hn::ConvertTo(F(), whole)};
  }
};

// Up with the probability of the fraction.
template <int kBits>
class Stochastic {
 public:
  // One block's.
  class Block {
   public:
    explicit HWY_INLINE Block(const uint32_t* words) : words_(words) {}

    HWY_INLINE Codes Of(size_t j, V scaled) const {
      const size_t place = kLanes * j;
      const auto words = hn::Load(U(), words_ + Generator::WordAt(place));
      V value = hn::Floor(AddUniform(scaled, words, place / kDrawLanes % 4));
      // |scaled| is at most qmax and an error of rounding, which is less than u's distance from 0
      // and 1 but for int8: there the sum may round to 128.
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
  // A block begins a group of draws, or is the second half of one.
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

// Rounds values that may lie beyond int4's codes. `Rounding`: of one block.
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

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_ROUNDING_INL_H_
