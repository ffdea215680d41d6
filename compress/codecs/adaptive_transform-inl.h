// adaptive's transform: blocks of 16-bit whole numbers, whose sums are exact, so that their order
// is free. Included once for each target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_TRANSFORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_TRANSFORM_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_TRANSFORM_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_TRANSFORM_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/hadamard.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A block has two orders. In `natural` order number i is element i. In `packed` order vector i is
// what a packing of two vectors of 32 bits leaves: within each 128 bits four numbers of vector 2i,
// then four of vector 2i + 1. The transform takes a block from one order to the other on its way,
// so that neither packing nor unpacking has to sort.
using W = hn::Vec<I16>;
inline constexpr size_t kWordLanes = hn::MaxLanes(I16());
inline constexpr size_t kWords = kTransform / kWordLanes;
struct alignas(64) Block16 {
  int16_t at[kTransform];
};

// Vector i of a packed block, of vectors 2i and 2i + 1.
HWY_INLINE W PackWords(hn::Vec<I> a, hn::Vec<I> b) { return hn::ReorderDemote2To(I16(), a, b); }

// The way back, times 2^16.
HWY_INLINE hn::Vec<I> LowerShifted(W packed) {
  return hn::BitCast(I(), hn::InterleaveLower(I16(), hn::Zero(I16()), packed));
}
HWY_INLINE hn::Vec<I> UpperShifted(W packed) {
  return hn::BitCast(I(), hn::InterleaveUpper(I16(), hn::Zero(I16()), packed));
}

// Sum and difference: the butterflies of the bit of the index that tells two vectors apart.
HWY_INLINE void Cross(W& a, W& b) {
  const W sum = hn::Add(a, b), difference = hn::Sub(a, b);
  a = sum;
  b = difference;
}

// The rest exchanges the bit that tells a from b for one within the vectors.

// The lowest three bits and that one, turned around by one place.
HWY_INLINE void Rotate(W& a, W& b) {
  const W low = hn::InterleaveLower(I16(), a, b), high = hn::InterleaveUpper(I16(), a, b);
  a = low;
  b = high;
}

// The bit that tells halves of 512 bits apart.
HWY_INLINE void ExchangeHalves(W& a, W& b) {
  const W low = hn::ConcatLowerLower(I16(), b, a), high = hn::ConcatUpperUpper(I16(), b, a);
  a = low;
  b = high;
}

// The bit that tells neighbouring blocks of 128 bits apart.
HWY_INLINE void ExchangeBlocks(W& a, W& b) {
  if constexpr (kWordLanes == 16) return ExchangeHalves(a, b);
  const W low = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
  b = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
  a = low;
}

// Pairs that go through the stages side by side: a stage of one pair waits for the stage before it.
inline constexpr size_t kPairs = 4;

// Applies a stage to pairs v[i], v[i + kWords / 2].
template <void (*kStage)(W&, W&)>
HWY_INLINE void ForPairs(W* v) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kPairs; ++i) kStage(v[i], v[i + kWords / 2]);
}

// The butterflies of all bits within the vectors, and of the one between them. The order of the two
// exchanges decides where the bits end.
template <bool kToNatural>
HWY_INLINE void CrossWithin(W* v) {
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  if constexpr (kWordLanes >= 32 && kToNatural) {
    ForPairs<ExchangeHalves>(v);
    ForPairs<Cross>(v);
  }
  if constexpr (kWordLanes >= 16) {
    ForPairs<ExchangeBlocks>(v);
    ForPairs<Cross>(v);
  }
  if constexpr (kWordLanes >= 32 && !kToNatural) {
    ForPairs<ExchangeHalves>(v);
    ForPairs<Cross>(v);
  }
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
  ForPairs<Cross>(v);
  ForPairs<Rotate>(v);
}

// The unscaled Walsh-Hadamard transform, from packed to natural order or from natural to packed.
template <bool kToNatural>
HWY_INLINE void TransformWords(W (&v)[kWords]) {
#pragma GCC unroll 16
  for (size_t stride = 1; stride < kWords / 2; stride *= 2) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kWords; ++i) {
      if ((i & stride) == 0) Cross(v[i], v[i + stride]);
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < kWords / 2; i += kPairs) CrossWithin<kToNatural>(v + i);
}

HWY_NOINLINE void TransformToPacked(Block16& block) {
  W v[kWords];
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) v[i] = hn::Load(I16(), block.at + kWordLanes * i);
  TransformWords<false>(v);
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) hn::Store(v[i], I16(), block.at + kWordLanes * i);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_TRANSFORM_INL_H_
