// The allreduce of a chunk by two hops, in six phases:
//   (1) encode the n - 1 foreign shards, with the first-hop residuals;
//   (2) every shard goes to its owner;
//   (3) the owner sums in rank order, its own shard unquantised;
//   (4) mean, second-hop residual, encode;
//   (5) every owner's result goes to everybody;
//   (6) decode the foreign shards.
// Owners decode their own bytes like everybody else: that is what makes replicas bit-identical.
#include <algorithm>
#include <vector>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/operands.h"
#include "schedule/collective/shards.h"

namespace thinwire {
namespace {

class TwoHopRun final : public ChunkRun {
 public:
  TwoHopRun(const ChunkJob& job, const Bench& bench)
      : job_(job),
        bench_(bench),
        n_(bench.members.size),
        me_(bench.members.rank),
        operands_(job_, bench_),
        verbatim_(IsVerbatim(job.codec.up, operands_.input().dtype) &&
                  IsVerbatim(job.codec.down, operands_.input().dtype)),
        results_(ResultRooms()) {
    for (int r = 0; r < n_; ++r) {
      const bool own = r == me_;
      outgoing_.push_back(own ? MutableBytes() : Room(job.codec.up, operands_.input(), r));
      incoming_.push_back(own ? MutableBytes() : IncomingRoom());
    }
  }

  // Verbatim blocks are large for their time on the processor: copying them early delays the sum.
  Reception first() const override {
    return verbatim_ ? Reception() : Reception{Tag(1), incoming_};
  }

  absl::StatusOr<const Hop*> Advance() override {
    switch (phase_++) {
      case 0: return EncodeForeign();
      case 1: return ReduceOwn();
      default: return DecodeForeign();
    }
  }

 private:
  absl::StatusOr<const Hop*> EncodeForeign() {
    const Range needed = verbatim_ ? Elements(0, n_) : Elements(me_, me_ + 1);
    if (absl::Status status = operands_.Load(needed); !status.ok()) return status;
    std::vector<EncodeArgs> foreign;
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      EncodeArgs shard = operands_.Encoding(Elements(r, r + 1));
      shard.extras.draws =
          DrawsOf(job_, job_.codec.up, me_ + 1, job_.chunk->codec_offset + Begin(r));
      shard.wire = outgoing_[r].data();
      foreign.push_back(shard);
    }
    if (!verbatim_) bench_.backend.EncodeAll(job_.codec.up, foreign);
    send_.assign(outgoing_.begin(), outgoing_.end());
    hop_ = {Stage::kEncode, Stage::kExchange, Tag(1), send_, incoming_};
    if (!verbatim_) hop_.next = {Tag(2), results_};
    return &hop_;
  }

  absl::StatusOr<const Hop*> ReduceOwn() {
    std::vector<const uint8_t*> wires;
    for (int r = 0; r < n_; ++r) wires.push_back(r == me_ ? nullptr : incoming_[r].data());
    const CodecSpec& down = job_.codec.down;
    bench_.backend.Reduce({.up = job_.codec.up,
                           .down = down,
                           .wires = wires,
                           .own = operands_.input().Slice(Begin(me_), Numel(me_)),
                           .scale = job_.scale,
                           .residual = Residual(me_),
                           .out = operands_.output().Slice(Begin(me_), Numel(me_)),
                           .wire_out = verbatim_ ? nullptr : results_[me_].data(),
                           .draws = DrawsOf(job_, down, 0, job_.chunk->codec_offset + Begin(me_))});
    std::fill(send_.begin(), send_.end(), Bytes(results_[me_]));
    hop_ = {Stage::kReduce, Stage::kGather, Tag(2), send_, results_};
    return &hop_;
  }

  absl::StatusOr<const Hop*> DecodeForeign() {
    std::vector<DecodeArgs> foreign;
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      foreign.push_back({results_[r].data(), operands_.output().Slice(Begin(r), Numel(r))});
    }
    if (!verbatim_) bench_.backend.DecodeAll(job_.codec.down, foreign);
    operands_.Store();
    return nullptr;
  }

  uint64_t Tag(uint64_t hop) const { return HashCombine(job_.tag, hop); }

  size_t Begin(int r) const { return job_.chunk->shard(r).begin - job_.chunk->elements.begin; }
  size_t Numel(int r) const { return job_.chunk->shard(r).end - job_.chunk->shard(r).begin; }
  // From rank `first`'s shard to that of the rank before `last`.
  Range Elements(int first, int last) const {
    return {Begin(first), Begin(last - 1) + Numel(last - 1)};
  }
  float* Residual(int r) const {
    return operands_.residual() == nullptr ? nullptr : operands_.residual() + Begin(r);
  }

  // Wire bytes of a shard: the tensor's own memory if verbatim, else scratch.
  MutableBytes Room(const CodecSpec& spec, TensorView chunk, int r) const {
    if (verbatim_) return BytesOf(chunk.Slice(Begin(r), Numel(r)));
    return bench_.scratch.Take(EncodedBytes(spec, Numel(r)));
  }
  bool ShardsAreEqual() const {
    for (int r = 1; r < n_; ++r) {
      if (Numel(r) != Numel(0)) return false;
    }
    return true;
  }
  std::vector<MutableBytes> ResultRooms() const {
    if (!verbatim_ && ShardsAreEqual()) {
      return bench_.scratch.TakeArray(n_, EncodedBytes(job_.codec.down, Numel(0)));
    }
    std::vector<MutableBytes> rooms;
    for (int r = 0; r < n_; ++r) rooms.push_back(Room(job_.codec.down, operands_.output(), r));
    return rooms;
  }
  MutableBytes IncomingRoom() const {
    return bench_.scratch.Take(verbatim_ ? Numel(me_) * sizeof(float)
                                         : EncodedBytes(job_.codec.up, Numel(me_)));
  }

  const ChunkJob job_;
  const Bench bench_;
  const int n_, me_;
  Operands operands_;
  const bool verbatim_;
  const std::vector<MutableBytes> results_;  // each encoded by its owner
  std::vector<MutableBytes> outgoing_;       // rank r's shard, encoded by this rank
  std::vector<MutableBytes> incoming_;       // this rank's shard, encoded by rank r
  std::vector<Bytes> send_;
  Hop hop_{};
  int phase_ = 0;
};

class TwoHopAlgorithm final : public Algorithm {
 public:
  std::string_view name() const override { return "two-hop"; }
  int hops() const override { return 2; }
  std::vector<size_t> ShardBounds(Range chunk, int world, size_t block) const override {
    const size_t numel = chunk.end - chunk.begin;
    const size_t blocks = (numel + block - 1) / block;
    std::vector<size_t> bounds;
    for (int r = 0; r <= world; ++r) {
      bounds.push_back(chunk.begin + std::min(numel, blocks * r / world * block));
    }
    return bounds;
  }
  Range SecondHop(const Chunk& chunk, int rank) const override { return chunk.shard(rank); }
  bool keeps_residuals() const override { return true; }
  std::unique_ptr<ChunkRun> Begin(const ChunkJob& job, const Bench& bench) const override {
    return std::make_unique<TwoHopRun>(job, bench);
  }
};

}  // namespace

const Algorithm& TwoHop() {
  static const TwoHopAlgorithm algorithm;
  return algorithm;
}

}  // namespace thinwire
