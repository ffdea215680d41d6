// The first hop of an allreduce by itself: encode the foreign shards with their residuals, send
// each to its owner, sum in rank order with the own shard unquantised. The result stays with its
// owner in full precision, so there is no second residual.
#include <utility>
#include <vector>

#include "compress/codec_traits.h"
#include "schedule/collective/operands.h"
#include "schedule/collective/shards.h"

namespace thinwire {
namespace {

// Each rank's part of the chunk is one piece of the bucket, and is worked on in its place.
// Residuals lie in the bucket's order.
class ReduceScatterRun final : public ChunkRun {
 public:
  ReduceScatterRun(const ChunkJob& job, const Bench& bench)
      : job_(job),
        bench_(bench),
        me_(bench.members.rank),
        verbatim_(IsVerbatim(job.codec.up, job.input.dtype)) {
    bench.scratch.Reset();
    for (int r = 0; r < bench.members.size; ++r) {
      const bool own = r == me_;
      outgoing_.push_back(own ? MutableBytes() : Room(Input(r)));
      incoming_.push_back(own ? MutableBytes() : bench.scratch.Take(WireBytes()));
    }
  }

  Reception first() const override { return verbatim_ ? Reception() : Reception{Tag(), incoming_}; }

  absl::StatusOr<const Hop*> Advance() override {
    if (std::exchange(sent_, true)) return ReduceOwn();
    return EncodeForeign();
  }

 private:
  uint64_t Tag() const { return HashCombine(job_.tag, 1); }

  absl::StatusOr<const Hop*> EncodeForeign() {
    if (!bench_.scratch.status().ok()) return bench_.scratch.status();
    std::vector<EncodeArgs> foreign;
    for (size_t r = 0; r < outgoing_.size(); ++r) {
      if (static_cast<int>(r) == me_) continue;
      const size_t first = job_.chunk->pieces[r].begin;
      EncodeExtras extras;
      extras.draws = DrawsOf(job_, job_.codec.up, me_ + 1, FirstDraw(r));
      float* const residual = job_.residual == nullptr ? nullptr : job_.residual + first;
      if (job_.undo != nullptr) {
        job_.undo->Save(bench_.backend, job_.chunk->pieces[r], job_.residual, nullptr);
      }
      foreign.push_back({Input(r), residual, outgoing_[r].data(), extras});
    }
    if (!verbatim_) bench_.backend.EncodeAll(job_.codec.up, foreign);
    send_.assign(outgoing_.begin(), outgoing_.end());
    hop_ = {Stage::kEncode, Stage::kExchange, Tag(), send_, incoming_};
    return &hop_;
  }

  absl::StatusOr<const Hop*> ReduceOwn() {
    std::vector<const uint8_t*> wires;
    for (const MutableBytes& wire : incoming_) wires.push_back(wire.data());
    wires[me_] = nullptr;
    const size_t part = job_.output.numel;
    const Range own = job_.chunk->pieces[me_];
    bench_.backend.Reduce({.up = job_.codec.up,
                           .down = LosslessSpec(DType::kF32),
                           .wires = wires,
                           .own = Input(me_),
                           .scale = job_.scale,
                           .residual = nullptr,
                           .out = job_.output.Slice(own.begin - part * me_, own.end - own.begin),
                           .wire_out = nullptr});
    return nullptr;
  }

  // Draws are counted from a block's border, and each rank's part has its own.
  size_t FirstDraw(size_t r) const {
    const size_t part = job_.output.numel;
    const size_t stride = (part + kMaxBlock - 1) / kMaxBlock * kMaxBlock;
    return r * stride + job_.chunk->pieces[r].begin - r * part;
  }

  TensorView Input(size_t r) const {
    const Range piece = job_.chunk->pieces[r];
    return job_.input.Slice(piece.begin, piece.end - piece.begin);
  }
  size_t WireBytes() const {
    const TensorView own = Input(me_);
    return verbatim_ ? own.bytes() : EncodedBytes(job_.codec.up, own.numel);
  }
  MutableBytes Room(TensorView part) const {
    return verbatim_ ? BytesOf(part) : bench_.scratch.Take(WireBytes());
  }

  const ChunkJob job_;
  const Bench bench_;
  const int me_;
  const bool verbatim_;
  std::vector<MutableBytes> outgoing_, incoming_;  // by rank
  std::vector<Bytes> send_;
  Hop hop_{};
  bool sent_ = false;
};

class ReduceScatterAlgorithm final : public Algorithm {
 public:
  std::string_view name() const override { return "reduce-scatter"; }
  int hops() const override { return 1; }
  std::vector<size_t> ShardBounds(Range chunk, int world, size_t) const override {
    std::vector<size_t> bounds;
    for (int r = 0; r <= world; ++r) {
      bounds.push_back(chunk.begin + (chunk.end - chunk.begin) / world * r);
    }
    return bounds;
  }
  Range SecondHop(const Chunk&, int) const override { return {}; }
  bool keeps_residuals() const override { return true; }
  std::unique_ptr<ChunkRun> Begin(const ChunkJob& job, const Bench& bench) const override {
    return std::make_unique<ReduceScatterRun>(job, bench);
  }
};

}  // namespace

const Algorithm& ReduceScatter() {
  static const ReduceScatterAlgorithm algorithm;
  return algorithm;
}

}  // namespace thinwire
