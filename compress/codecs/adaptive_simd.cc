// Compiled once for each instruction set. The bytes must equal those of adaptive_reference.cc.
#include "compress/codecs/adaptive_simd.h"

#include "compress/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/codecs/adaptive_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "compress/codecs/adaptive.h"
#include "compress/piece.h"
#include "compress/unaligned.h"

// All are compiled per target, each behind an include guard of its own.
#include "compress/codecs/adaptive_block-inl.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

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

// Of x(j), vector j of a block.
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

// Blocks.

// Encodes a block of any width, and leaves the sums of its levels if they are wanted.
template <int kWidth>
HWY_INLINE void CodesOf(W (&v)[kWords], bool wanted, uint8_t* HWY_RESTRICT planes, Sums& sums) {
  sums.wide = kWidth > kNarrowWidth;
  if constexpr (kWidth <= kNarrowWidth) {
    EncodeNarrow<kWidth>(v, planes);
    if (!wanted) return;
    TransformWords(v);
    StoreWords(v, sums.coarse);
  } else {
    Block16 whole;
    StoreWords(v, whole);
    EncodeWide<kWidth>(whole, planes, sums);
    if (!wanted) return;
    TransformBlock(sums.coarse);
    TransformBlock(sums.fine);
  }
}

template <int kWidth>
HWY_INLINE void SumsOf(const uint8_t* HWY_RESTRICT planes, Sums& sums) {
  sums.wide = kWidth > kNarrowWidth;
  if constexpr (kWidth <= kNarrowWidth) {
    W v[kWords];
    DecodeNarrow<kWidth>(planes, v);
    TransformWords(v);
    StoreWords(v, sums.coarse);
  } else {
    DecodeWide<kWidth>(planes, sums);
    TransformBlock(sums.coarse);
    TransformBlock(sums.fine);
  }
}

// Calls visit(width as a constant), from 1 to 8.
template <class Visit>
HWY_INLINE void WithWidth(int width, Visit visit) {
  switch (width) {
    case 1: return visit(std::integral_constant<int, 1>());
    case 2: return visit(std::integral_constant<int, 2>());
    case 3: return visit(std::integral_constant<int, 3>());
    case 4: return visit(std::integral_constant<int, 4>());
    case 5: return visit(std::integral_constant<int, 5>());
    case 6: return visit(std::integral_constant<int, 6>());
    case 7: return visit(std::integral_constant<int, 7>());
    default: return visit(std::integral_constant<int, 8>());
  }
}

// With feedback x becomes its loss.
template <bool kFeedback>
HWY_INLINE void EncodeBlock(float* HWY_RESTRICT x, float head, int width,
                            const float* HWY_RESTRICT signs, uint8_t* HWY_RESTRICT planes) {
  if (width == 0) return;
  const V inverse = hn::Set(F(), AdaptiveInverse(head));
  const auto whole = [&](size_t j) HWY_ATTR {
    const V factor = hn::Mul(hn::Load(F(), signs + kLanes * j), inverse);
    return RoundToInt(hn::Mul(hn::LoadU(F(), x + kLanes * j), factor));
  };
  Sums sums;
  WithWidth(width, [&](auto constant) HWY_ATTR {
    W v[kWords];
#pragma GCC unroll 32
    for (size_t i = 0; i < kWords; ++i) v[i] = PackWords(whole(2 * i), whole(2 * i + 1));
    TransformWords(v);
    CodesOf<constant()>(v, kFeedback, planes, sums);
  });
  if constexpr (!kFeedback) return;
  const V step = hn::Set(F(), AdaptiveStep(head, width));
#pragma GCC unroll 64
  for (size_t j = 0; j < kBlockVectors; ++j) {
    const V lost = hn::Sub(hn::LoadU(F(), x + kLanes * j), sums.Values(j, signs, step));
    hn::StoreU(lost, F(), x + kLanes * j);
  }
}

template <bool kAdd>
HWY_INLINE void PutVector(V value, float* out) {
  if constexpr (kAdd) value = hn::Add(hn::LoadU(F(), out), value);
  hn::StoreU(value, F(), out);
}

template <bool kAdd>
HWY_INLINE void DecodeBlock(uint16_t half, int width, const float* HWY_RESTRICT signs,
                            const uint8_t* HWY_RESTRICT planes, float* HWY_RESTRICT out) {
  if (width == 0) {
    const float value = half < kFirstNonFiniteHead ? 0.0f : FloatOf(uint32_t{kNanScale} << 16);
    for (size_t j = 0; j < kBlockVectors; ++j) {
      PutVector<kAdd>(hn::Set(F(), value), out + kLanes * j);
    }
    return;
  }
  Sums sums;
  WithWidth(width, [&](auto constant) HWY_ATTR { SumsOf<constant()>(planes, sums); });
  const V step = hn::Set(F(), AdaptiveStep(FloatOf(uint32_t{half} << 16), width));
#pragma GCC unroll 16
  for (size_t j = 0; j < kBlockVectors; ++j) {
    PutVector<kAdd>(sums.Values(j, signs, step), out + kLanes * j);
  }
}

// Pieces.

// The walk's width for the block, and where its codes lie.
HWY_INLINE int NextWidth(const Piece& piece, uint16_t head, size_t block, size_t* at) {
  Walk& walk = *piece.walk;
  const int threshold = walk.threshold - (block < walk.raised ? 1 : 0);
  const int width = AdaptiveWidth(head, threshold, static_cast<int>(piece.shard.spec.floor));
  *at = piece.shard.layout.codes_at + walk.next_at;
  walk.next_at += width * kPlaneBytes;
  return width;
}

template <bool kFeedback>
void EncodePiece(const Piece& piece, float* x, uint8_t* wire) {
  const float* const signs = piece.shard.signs.data();
  for (size_t done = 0; done < piece.numel; done += kTransform) {
    const size_t block = (piece.begin + done) / kTransform, count = piece.numel - done;
    const uint16_t half = Get<uint16_t>(wire, block);
    if (half >= kFirstNonFiniteHead) continue;
    size_t at;
    const int width = NextWidth(piece, half, block, &at);
    const float head = FloatOf(uint32_t{half} << 16);
    if (HWY_LIKELY(count >= kTransform)) {
      PrefetchBlock(x + done, kTransform * sizeof(float));
      EncodeBlock<kFeedback>(x + done, head, width, signs, wire + at);
      continue;
    }
    Filled filled(x + done, count);
    EncodeBlock<kFeedback>(filled.at, head, width, signs, wire + at);
    if constexpr (kFeedback) std::memcpy(x + done, filled.at, count * sizeof(float));
  }
}

template <bool kAdd>
void DecodePiece(const Piece& piece, const uint8_t* wire, float* out) {
  const float* const signs = piece.shard.signs.data();
  for (size_t done = 0; done < piece.numel; done += kTransform) {
    const size_t block = (piece.begin + done) / kTransform, count = piece.numel - done;
    const uint16_t half = Get<uint16_t>(wire, block);
    size_t at;
    const int width = NextWidth(piece, half, block, &at);
    if (HWY_LIKELY(count >= kTransform)) {
      if constexpr (kAdd) PrefetchBlock(out + done, kTransform * sizeof(float));
      DecodeBlock<kAdd>(half, width, signs, wire + at, out + done);
      continue;
    }
    Filled values(out + done, kAdd ? count : 0);
    DecodeBlock<kAdd>(half, width, signs, wire + at, values.at);
    std::memcpy(out + done, values.at, count * sizeof(float));
  }
}

void HeadsT(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  uint8_t* const heads = wire + piece.begin / kTransform * sizeof(uint16_t);
  r != nullptr ? HeadsOf<true>(piece, g, r, heads) : HeadsOf<false>(piece, g, r, heads);
}

// Without feedback x is read only.
void EncodeT(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  r != nullptr ? EncodePiece<true>(piece, r, wire)
               : EncodePiece<false>(piece, const_cast<float*>(g), wire);
}
void DecodeT(const Piece& piece, const uint8_t* wire, float* out) {
  DecodePiece<false>(piece, wire, out);
}
void DecodeAddT(const Piece& piece, const uint8_t* wire, float* sum) {
  DecodePiece<true>(piece, wire, sum);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire::simd {

HWY_EXPORT(HeadsT);
HWY_EXPORT(BeginT);
HWY_EXPORT(EncodeT);
HWY_EXPORT(DecodeT);
HWY_EXPORT(DecodeAddT);

void Heads(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  HWY_DYNAMIC_DISPATCH(HeadsT)(piece, g, r, wire);
}
void Begin(const Shard& shard, const uint8_t* wire, Walk* walk) {
  HWY_DYNAMIC_DISPATCH(BeginT)(shard, wire, walk);
}
void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  HWY_DYNAMIC_DISPATCH(EncodeT)(piece, g, r, wire);
}
void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeT)(piece, wire, out);
}
void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  HWY_DYNAMIC_DISPATCH(DecodeAddT)(piece, wire, sum);
}

}  // namespace thinwire::simd

namespace thinwire::codecs {

constinit const CodecOperations kAdaptiveSimd = {.dense = {.encode = simd::Encode,
                                                           .decode = simd::Decode,
                                                           .decode_add = simd::DecodeAdd,
                                                           .heads = simd::Heads,
                                                           .begin = simd::Begin},
                                                 .entries = {}};

}  // namespace thinwire::codecs
#endif  // HWY_ONCE
