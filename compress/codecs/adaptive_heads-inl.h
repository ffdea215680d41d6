// adaptive's heads, and the widths that follow from them. Included once for each target.
#if defined(THINWIRE_COMPRESS_CODECS_ADAPTIVE_HEADS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_CODECS_ADAPTIVE_HEADS_INL_H_
#undef THINWIRE_COMPRESS_CODECS_ADAPTIVE_HEADS_INL_H_
#else
#define THINWIRE_COMPRESS_CODECS_ADAPTIVE_HEADS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "compress/codecs/adaptive.h"
#include "compress/shard_layout.h"
#include "compress/simd_quantise-inl.h"
#include "compress/types.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr size_t kBlockVectors = kTransform / kLanes;

// A last block that is not full is filled up with zeros.
struct alignas(64) Filled {
  Filled(const float* from, size_t count) {
    std::fill(at + count, at + kTransform, 0.0f);
    std::memcpy(at, from, count * sizeof(float));
  }
  float at[kTransform];
};

// Heads.

// Sums the squares of a block; x(j) gives its vector j.
template <class X>
HWY_INLINE float SumOfSquares(X x) {
  constexpr size_t kParts = kSumLanes / kLanes;
  V part[kParts];
  for (size_t t = 0; t < kParts; ++t) part[t] = hn::Zero(F());
#pragma GCC unroll 64
  for (size_t j = 0; j < kBlockVectors; ++j) {
    const V value = x(j);
    part[j % kParts] = hn::Add(part[j % kParts], hn::Mul(value, value));
  }
  for (size_t width = kParts / 2; width > 0; width /= 2) {
    for (size_t t = 0; t < width; ++t) part[t] = hn::Add(part[t], part[t + width]);
  }
  return FoldVector(part[0]);
}

// The head of a block, and x in the residual's place.
template <bool kFeedback>
HWY_INLINE uint16_t HeadOfBlock(const float* HWY_RESTRICT g, float* HWY_RESTRICT r) {
  V x[kBlockVectors];
#pragma GCC unroll 64
  for (size_t j = 0; j < kBlockVectors; ++j) x[j] = LoadX<kFeedback>(g, r, kLanes * j);
  const float sum = SumOfSquares([&](size_t j) HWY_ATTR { return x[j]; });
  uint16_t head;
  if (HWY_LIKELY(SquaresAreInRange(sum))) {
    head = AdaptiveHead(sum, 1.0f);
  } else {
    const float factor = SquaresFactor(sum);
    const V scale = hn::Set(F(), factor);
    head = AdaptiveHead(SumOfSquares([&](size_t j) HWY_ATTR { return hn::Mul(x[j], scale); }),
                        Undo(factor));
  }
  if (!kFeedback || head == kNanScale) return head;
#pragma GCC unroll 64
  for (size_t j = 0; j < kBlockVectors; ++j) hn::StoreU(x[j], F(), r + kLanes * j);
  return head;
}

template <bool kFeedback>
void HeadsOf(const Piece& piece, const float* g, float* r, uint8_t* heads) {
  size_t b = 0, done = 0;
  for (; done + kTransform <= piece.numel; ++b, done += kTransform) {
    PrefetchBlock(g + done, kTransform * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r + done, kTransform * sizeof(float));
    Put(heads, b, HeadOfBlock<kFeedback>(g + done, kFeedback ? r + done : nullptr));
  }
  const size_t rest = piece.numel - done;
  if (rest == 0) return;
  const Filled x(g + done, rest);
  Filled kept(kFeedback ? r + done : g, kFeedback ? rest : 0);
  Put(heads, b, HeadOfBlock<kFeedback>(x.at, kept.at));
  if constexpr (kFeedback) std::memcpy(r + done, kept.at, rest * sizeof(float));
}

// Widths.

// Bit planes of all blocks under a threshold.
HWY_INLINE size_t PlanesUnder(const uint8_t* heads, size_t blocks, int threshold, int floor) {
  const I16 d;
  const auto least = hn::Set(d, static_cast<int16_t>(floor));
  const auto most = hn::Set(d, kMaxWidth);
  const auto under = hn::Set(d, static_cast<int16_t>(threshold));
  const auto first_bad = hn::Set(d, static_cast<int16_t>(kFirstNonFiniteHead));
  constexpr size_t kLanes16 = hn::MaxLanes(I16());
  constexpr size_t kRun = 2048 * kLanes16;  // so many widths of 8 add up within 16 bits
  size_t planes = 0, b = 0;
  while (b + kLanes16 <= blocks) {
    const size_t end = std::min(blocks, b + kRun);
    auto sum = hn::Zero(d);
    for (; b + kLanes16 <= end; b += kLanes16) {
      const auto head = hn::LoadU(d, reinterpret_cast<const int16_t*>(heads + 2 * b));
      const auto width = hn::ShiftRight<7>(hn::SaturatedSub(head, under));
      const auto clamped = hn::Min(hn::Max(width, least), most);
      const auto counts = hn::And(hn::Gt(head, hn::Zero(d)), hn::Lt(head, first_bad));
      sum = hn::Add(sum, hn::IfThenElseZero(counts, clamped));
    }
    const auto pairs = hn::BitCast(I(), sum);
    const auto low = hn::ShiftRight<16>(hn::ShiftLeft<16>(pairs));
    planes += hn::GetLane(hn::SumOfLanes(I(), hn::Add(low, hn::ShiftRight<16>(pairs))));
  }
  for (; b < blocks; ++b) planes += AdaptiveWidth(Get<uint16_t>(heads, b), threshold, floor);
  return planes;
}

void BeginT(const Shard& shard, const uint8_t* wire, Walk* walk) {
  const size_t blocks = shard.layout.blocks;
  const size_t budget = AdaptivePlanes(shard.spec.sixteenths, blocks);
  const int floor = static_cast<int>(shard.spec.floor);
  // The floor fits, so the highest threshold does, whatever the heads are.
  int low = kLowestThreshold, high = kHighestThreshold;
  size_t fitting = 0;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const size_t planes = PlanesUnder(wire, blocks, middle, floor);
    if (planes <= budget) {
      high = middle;
      fitting = planes;
    } else {
      low = middle + 1;
    }
  }
  if (low == kHighestThreshold) fitting = PlanesUnder(wire, blocks, low, floor);
  *walk = {low, 0, 0};
  for (size_t left = budget - fitting; walk->raised < blocks; ++walk->raised) {
    const uint16_t head = Get<uint16_t>(wire, walk->raised);
    const size_t more = AdaptiveWidth(head, low - 1, floor) - AdaptiveWidth(head, low, floor);
    if (more > left) break;
    left -= more;
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_CODECS_ADAPTIVE_HEADS_INL_H_
