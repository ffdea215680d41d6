// Compiled once for each instruction set. The bytes must equal those of adaptive_reference.cc.
#include "compress/codecs/adaptive_simd.h"

#include "compress/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/codecs/adaptive_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>
#include <span>

#include "compress/codecs/adaptive.h"
#include "compress/shard_layout.h"
#include "compress/types.h"

// All are compiled per target, each behind an include guard of its own.
#include "compress/codecs/adaptive_blocks-inl.h"
#include "compress/codecs/adaptive_heads-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The blocks of a piece's elements. A last one that is not full lies elsewhere, filled up.
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
// what is missing, and run(tasks).
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

// `out` counts with kBoth only.
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

// The wire is read only.
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

// Without feedback x is read only.
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

constinit const CodecOperations kAdaptiveSimd = {
    .dense = {.encode = simd::Encode,
              .decode = simd::Decode,
              .decode_add = simd::DecodeAdd,
              .heads = simd::Heads,
              .begin = simd::Begin,
              .encode_and_decode = simd::EncodeAndDecode},
    .entries = {}};

}  // namespace thinwire::codecs
#endif  // HWY_ONCE
