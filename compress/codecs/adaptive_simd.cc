// Compiled once per instruction set. The bytes must equal those of adaptive_reference.cc.
#include "compress/codec_info.h"
#include "compress/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/codecs/adaptive_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "compress/codecs/adaptive.h"
#include "compress/types.h"

// All are compiled per target, each with its own include guard.
#include "compress/codecs/adaptive_codes-inl.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Heads, and the widths that follow from them.

inline constexpr size_t kBlockVectors = kTransform / kLanes;

// A last block that is not full is padded with zeros.
struct alignas(64) Filled {
  Filled(const float* from, size_t count) {
    std::fill(at + count, at + kTransform, 0.0f);
    std::memcpy(at, from, count * sizeof(float));
  }
  float at[kTransform];
};

// Sums the squares of a block whose vector j is x(j).
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

// Returns the head of a block, and stores x in the residual.
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

// Bit planes of all blocks for a threshold.
HWY_INLINE size_t PlanesUnder(const uint8_t* heads, size_t blocks, int threshold, int floor) {
  const I16 d;
  const auto least = hn::Set(d, static_cast<int16_t>(floor));
  const auto most = hn::Set(d, kMaxWidth);
  const auto under = hn::Set(d, static_cast<int16_t>(threshold));
  const auto first_bad = hn::Set(d, static_cast<int16_t>(kFirstNonFiniteHead));
  constexpr size_t kLanes16 = hn::MaxLanes(I16());
  constexpr size_t kRun = 2048 * kLanes16;  // sums of this many widths of 8 fit in 16 bits
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
  // The floor fits, so the highest threshold does, for any heads.
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

// Blocks: transformed, coded, decoded, several at a time.

// +-step, with the signs of vector j.
HWY_INLINE V WithSigns(V step, const float* HWY_RESTRICT signs, size_t j) {
  return hn::CopySign(step, hn::Load(F(), signs + kLanes * j));
}

// The transform of x, in natural order; `signs` are the shard's, each a sixteenth.
HWY_NOINLINE void TransformOf(const float* HWY_RESTRICT x, const float* HWY_RESTRICT signs,
                              float inverse, Block16& block) {
  const V factor = hn::Set(F(), inverse * (1.0f / 16));
  const auto whole = [&](size_t j) HWY_ATTR {
    return RoundToInt(hn::Mul(hn::LoadU(F(), x + kLanes * j), WithSigns(factor, signs, j)));
  };
  W v[kWords];
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) v[i] = PackWords(whole(2 * i), whole(2 * i + 1));
  TransformWords<true>(v);
#pragma GCC unroll 32
  for (size_t i = 0; i < kWords; ++i) hn::Store(v[i], I16(), block.at + kWordLanes * i);
}

// Calls put(j, whole, factor) for sums of levels in packed order; whole * factor is vector j of the
// elements. `step` is AdaptiveStep.

// Products are exact, fused or not: sums have 15 bits and heads from an encoder 8. The factor stays
// a normal number with its 2^-16, which cancels the 2^16 by which the sums are multiplied.
template <class Put>
HWY_INLINE void ForNarrowValues(const Block16& sums, const float* HWY_RESTRICT signs, float step,
                                Put put) {
  const V factor = hn::Set(F(), step * (1.0f / 16) * 0x1p-16f);
  for (size_t i = 0; i < kWords; ++i) {
    const W whole = hn::Load(I16(), sums.at + kWordLanes * i);
    put(2 * i, hn::ConvertTo(F(), LowerShifted(whole)), WithSigns(factor, signs, 2 * i));
    put(2 * i + 1, hn::ConvertTo(F(), UpperShifted(whole)), WithSigns(factor, signs, 2 * i + 1));
  }
}

// Products that are not exact are rounded here, and the factor is 1.
template <class Put>
HWY_INLINE void ForValues(const Parts& sums, const float* HWY_RESTRICT signs, float step, Put put) {
  const V one = hn::Set(F(), 1.0f), factor = hn::Set(F(), step * (1.0f / 16));
  const auto value = [&](hn::Vec<I> coarse, hn::Vec<I> fine, size_t j) HWY_ATTR {
    const auto whole =
        hn::Add(hn::ShiftRight<16 - codecs::kFineBits>(coarse), hn::ShiftRight<16>(fine));
    return hn::Mul(hn::ConvertTo(F(), whole), WithSigns(factor, signs, j));
  };
  for (size_t i = 0; i < kWords; ++i) {
    const W coarse = hn::Load(I16(), sums.coarse.at + kWordLanes * i);
    const W fine = hn::Load(I16(), sums.fine.at + kWordLanes * i);
    put(2 * i, value(LowerShifted(coarse), LowerShifted(fine), 2 * i), one);
    put(2 * i + 1, value(UpperShifted(coarse), UpperShifted(fine), 2 * i + 1), one);
  }
}

// A block in progress. Several go through each stage together: the stages of one block wait for
// each other, but the blocks within a stage do not.
struct Task {
  float* values;
  float* decoded;  // the decoded values, if a caller needs them too
  uint8_t* planes;
  uint16_t head;
  int width;   // 0: only `values` and `head` are used
  Parts sums;  // narrow blocks use only the coarse part

  // True if products of sums of levels are exact: for narrow widths and heads from an encoder.
  bool narrow() const { return width <= kNarrowWidth && head >= kFirstHead && head <= kHugeHead; }
  float scale() const { return FloatOf(uint32_t{head} << 16); }
};
inline constexpr size_t kTasks = 4;

HWY_INLINE void SumLevels(std::span<Task> tasks) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    TransformToPacked(task.sums.coarse);
    if (!task.narrow()) TransformToPacked(task.sums.fine);
  }
}

// put(j, whole, factor) for the elements of a block that has codes.
template <class Put>
HWY_INLINE void ForElements(const Task& task, const float* HWY_RESTRICT signs, Put put) {
  const float step = AdaptiveStep(task.scale(), task.width);
  if (HWY_LIKELY(task.narrow())) {
    ForNarrowValues(task.sums.coarse, signs, step, put);
  } else {
    ForValues(task.sums, signs, step, put);
  }
}

// Calls put(j, whole, factor) for all elements, including those of a block without codes.
template <class Put>
HWY_INLINE void ForDecoded(const Task& task, const float* HWY_RESTRICT signs, Put put) {
  if (HWY_LIKELY(task.width > 0)) return ForElements(task, signs, put);
  const bool finite = task.head < kFirstNonFiniteHead;
  const V value = hn::Set(F(), finite ? 0.0f : FloatOf(uint32_t{kNanScale} << 16));
  for (size_t j = 0; j < kBlockVectors; ++j) put(j, value, hn::Set(F(), 1.0f));
}

// The output of an encoding besides codes. kLoss: x becomes its loss. kBoth: `decoded` is set too.
enum class Leaves { kNothing, kLoss, kBoth };

template <Leaves kLeaves>
HWY_INLINE void Encode(std::span<Task> tasks, const float* HWY_RESTRICT signs) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    TransformOf(task.values, signs, AdaptiveInverse(task.scale()), task.sums.coarse);
  }
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    if (HWY_LIKELY(task.narrow())) {
      EncodeNarrow(task.width, task.sums.coarse, task.planes);
    } else {
      EncodeWide(task.width, task.sums, task.planes);
    }
  }
  if constexpr (kLeaves == Leaves::kNothing) return;
  SumLevels(tasks);
  for (const Task& task : tasks) {
    const auto put_decoded = [out = task.decoded](size_t j, V whole, V factor) HWY_ATTR {
      hn::StoreU(hn::Mul(whole, factor), F(), out + kLanes * j);
    };
    if (task.width > 0) {
      ForElements(task, signs, [&, x = task.values](size_t j, V whole, V factor) HWY_ATTR {
        float* const at = x + kLanes * j;
        hn::StoreU(hn::NegMulAdd(whole, factor, hn::LoadU(F(), at)), F(), at);
        if constexpr (kLeaves == Leaves::kBoth) put_decoded(j, whole, factor);
      });
    } else if constexpr (kLeaves == Leaves::kBoth) {
      ForDecoded(task, signs, put_decoded);
    }
  }
}

template <To kTo>
HWY_INLINE void Decode(std::span<Task> tasks, const float* HWY_RESTRICT signs) {
  for (Task& task : tasks) {
    if (task.width == 0) continue;
    if (HWY_LIKELY(task.narrow())) {
      DecodeNarrow(task.width, task.planes, task.sums.coarse);
    } else {
      DecodeParts(task.width, task.planes, task.sums);
    }
  }
  SumLevels(tasks);
  for (const Task& task : tasks) {
    const auto put = [out = task.values](size_t j, V whole, V factor) HWY_ATTR {
      float* const at = out + kLanes * j;
      if constexpr (kTo == To::kSum) {
        hn::StoreU(hn::MulAdd(whole, factor, hn::LoadU(F(), at)), F(), at);
      } else if constexpr (kTo == To::kPast) {
        hn::Stream(hn::Mul(whole, factor), F(), at);
      } else {
        hn::StoreU(hn::Mul(whole, factor), F(), at);
      }
    };
    ForDecoded(task, signs, put);
  }
}

// Operations.

// The blocks of a piece's elements. A last one that is not full is copied and padded.
class BlocksOf {
 public:
  BlocksOf(float* at, size_t numel, bool are_read)
      : at_(at),
        rest_(numel % kTransform),
        full_(numel - rest_),
        tail_(at + full_, are_read ? rest_ : 0) {}

  float* At(size_t begin) { return begin < full_ ? at_ + begin : tail_.at; }
  void WriteTail() const { std::memcpy(at_ + full_, tail_.at, rest_ * sizeof(float)); }

 private:
  float* const at_;
  const size_t rest_, full_;
  Filled tail_;
};

// Calls take(task, its first element in the piece) for each block, along the piece's walk, to set
// the remaining fields, and run(tasks).
template <class Take, class Run>
HWY_INLINE void ForTasks(const Piece& piece, uint8_t* wire, Take take, Run run) {
  Walk& walk = *piece.walk;
  Task tasks[kTasks];
  size_t count = 0;
  for (size_t done = 0; done < piece.numel; done += kTransform) {
    const size_t block = (piece.begin + done) / kTransform;
    Task& task = tasks[count++];
    take(task, done);
    task.planes = wire + piece.shard.layout.codes_at + walk.next_at;
    task.head = Get<uint16_t>(wire, block);
    task.width = AdaptiveWidth(task.head, walk.threshold - (block < walk.raised ? 1 : 0),
                               static_cast<int>(piece.shard.spec.floor));
    walk.next_at += task.width * kPlaneBytes;
    if (count < kTasks && done + kTransform < piece.numel) continue;
    run(std::span<Task>(tasks, count));
    count = 0;
  }
}

// `out` is used only with kBoth.
template <Leaves kLeaves>
void EncodePiece(const Piece& piece, float* x, uint8_t* wire, float* out) {
  constexpr bool kBoth = kLeaves == Leaves::kBoth;
  BlocksOf values(x, piece.numel, true), decoded(kBoth ? out : x, piece.numel, false);
  ForTasks(
      piece, wire,
      [&](Task& task, size_t begin) HWY_ATTR {
        task.values = values.At(begin);
        PrefetchBlock(task.values, kTransform * sizeof(float));
        if constexpr (kBoth) task.decoded = decoded.At(begin);
      },
      [&](std::span<Task> tasks) HWY_ATTR { Encode<kLeaves>(tasks, piece.shard.signs.data()); });
  if constexpr (kLeaves != Leaves::kNothing) values.WriteTail();
  if constexpr (kBoth) decoded.WriteTail();
}

// The wire is only read.
template <To kTo>
void DecodePiece(const Piece& piece, const uint8_t* wire, float* out) {
  constexpr bool kAdd = kTo == To::kSum;
  BlocksOf values(out, piece.numel, kAdd);
  ForTasks(
      piece, const_cast<uint8_t*>(wire),
      [&](Task& task, size_t begin) HWY_ATTR {
        task.values = values.At(begin);
        if constexpr (kAdd) PrefetchBlock(task.values, kTransform * sizeof(float));
      },
      [&](std::span<Task> tasks) HWY_ATTR { Decode<kTo>(tasks, piece.shard.signs.data()); });
  if constexpr (kTo == To::kPast) hwy::FlushStream();
  values.WriteTail();
}

void HeadsT(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  uint8_t* const heads = wire + piece.begin / kTransform * sizeof(uint16_t);
  r != nullptr ? HeadsOf<true>(piece, g, r, heads) : HeadsOf<false>(piece, g, r, heads);
}

// Without feedback x is only read.
void EncodeT(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  r != nullptr ? EncodePiece<Leaves::kLoss>(piece, r, wire, nullptr)
               : EncodePiece<Leaves::kNothing>(piece, const_cast<float*>(g), wire, nullptr);
}
void EncodeAndDecodeT(const Piece& piece, float* r, uint8_t* wire, float* out) {
  EncodePiece<Leaves::kBoth>(piece, r, wire, out);
}
void DecodeT(const Piece& piece, const uint8_t* wire, float* out) {
  GoesPastCaches(piece.numel, out) ? DecodePiece<To::kPast>(piece, wire, out)
                                   : DecodePiece<To::kOut>(piece, wire, out);
}
void DecodeAddT(const Piece& piece, const uint8_t* wire, float* sum) {
  DecodePiece<To::kSum>(piece, wire, sum);
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire::simd {

HWY_EXPORT(HeadsT);
HWY_EXPORT(BeginT);
HWY_EXPORT(EncodeT);
HWY_EXPORT(EncodeAndDecodeT);
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
void EncodeAndDecode(const Piece& piece, float* r, uint8_t* wire, float* out) {
  HWY_DYNAMIC_DISPATCH(EncodeAndDecodeT)(piece, r, wire, out);
}
void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeT)(piece, wire, out);
}
void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  HWY_DYNAMIC_DISPATCH(DecodeAddT)(piece, wire, sum);
}

}  // namespace thinwire::simd

namespace thinwire::codecs {

constinit const CodecOperations Adaptive::kSimd = {.encode = simd::Encode,
                                                   .decode = simd::Decode,
                                                   .decode_add = simd::DecodeAdd,
                                                   .heads = simd::Heads,
                                                   .begin = simd::Begin,
                                                   .encode_and_decode = simd::EncodeAndDecode};

}  // namespace thinwire::codecs
#endif  // HWY_ONCE
