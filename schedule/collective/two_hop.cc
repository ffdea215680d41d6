// The allreduce of a chunk by two hops, in six phases:
//   (1) encode the n - 1 foreign shards, with the first-hop residuals;
//   (2) every shard goes to its owner;
//   (3) the owner sums in rank order, its own shard unquantised;
//   (4) mean, second-hop residual, encode;
//   (5) every owner's result goes to every rank;
//   (6) decode the foreign shards.
// Owners decode their own bytes like every other rank: that is what makes replicas bit-identical.
//
// A reduce-scatter is the first half, (1) to (3): the result stays with its owner in full
// precision, so there is no second residual. An all-gather is the second half, (4) to (6), and
// begins with each rank's own elements, which it decodes as well. In both halves a rank's part of
// the chunk is one piece of the bucket, and is worked on in its place; residuals lie in the
// bucket's order.
#include <algorithm>
#include <optional>
#include <vector>

#include "compress/types.h"
#include "schedule/collective/algorithm.h"

namespace thinwire {
namespace {

enum class Half { kBoth, kScatter, kGather };

class TwoHopRun final : public ChunkRun {
 public:
  TwoHopRun(const ChunkJob& job, Workspace& space, Half half)
      : ChunkRun(job, space), half_(half), shards_(n_) {
    if (half_ == Half::kBoth) operands_.emplace(job_, space_);
    for (int r = 0; r < n_; ++r) shards_[r] = ShardOf(r);
    const bool up = IsVerbatim(job_.codec.up, shards_[me_].input.dtype);
    const bool down = IsVerbatim(job_.codec.down, shards_[me_].input.dtype);
    verbatim_ = half_ == Half::kBoth ? up && down : half_ == Half::kScatter ? up : down;
    if (half_ != Half::kScatter) TakeResults();
    if (half_ != Half::kGather) TakeShards();
  }

  // Verbatim blocks are large and are not encoded: copying them early would delay the sum.
  Reception first() const override {
    if (verbatim_) return {};
    return {Tag(1), half_ == Half::kGather ? results_ : incoming_};
  }

 private:
  // Rank r's part of the chunk, as this rank has it.
  struct Shard {
    TensorView input, output;
    float* residual = nullptr;
    size_t begin = 0;       // relative to the chunk's start; only in a whole allreduce
    size_t first_draw = 0;  // of stochastic rounding
  };

  absl::Status Work(int phase) override {
    if (half_ == Half::kGather) {
      phase == 0 ? EncodeOwn() : DecodeForeign();
    } else {
      phase == 0 ? EncodeForeign() : phase == 1 ? ReduceOwn() : DecodeForeign();
    }
    return absl::OkStatus();
  }

  void EncodeForeign() {
    if (operands_) operands_->Load(verbatim_ ? Range{0, job_.chunk->numel()} : Elements(me_));
    std::vector<EncodeArgs> foreign;
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      const Shard& s = shards_[r];
      EncodeArgs shard =
          operands_ ? operands_->Encoding(Elements(r)) : EncodeArgs{s.input, s.residual};
      shard.draws = DrawsOf(job_, job_.codec.up, me_ + 1, s.first_draw);
      shard.wire = outgoing_[r].data();
      foreign.push_back(shard);
    }
    if (!verbatim_) space_.backend.EncodeAll(job_.codec.up, foreign);
    const bool result_may_come = !verbatim_ && half_ == Half::kBoth;
    Exchange(Stage::kEncode, Stage::kExchange, Each(outgoing_), incoming_,
             result_may_come ? results_ : std::span<const MutableBytes>());
  }

  void ReduceOwn() {
    const Shard& own = shards_[me_];
    const bool scatters = half_ == Half::kScatter;
    const CodecSpec down = scatters ? LosslessSpec(DType::kF32) : job_.codec.down;
    std::vector<const uint8_t*> wires = Pointers(incoming_);
    wires[me_] = nullptr;
    space_.backend.Reduce({.up = job_.codec.up,
                           .down = down,
                           .wires = wires,
                           .own = own.input,
                           .scale = job_.scale,
                           .residual = scatters ? nullptr : own.residual,
                           .out = own.output,
                           .wire_out = scatters || verbatim_ ? nullptr : results_[me_].data(),
                           .draws = DrawsOf(job_, down, 0, own.first_draw),
                           .scratch = scratch_});
    if (scatters) return;
    Exchange(Stage::kReduce, Stage::kGather, ToAll(results_[me_]), results_);
  }

  void EncodeOwn() {
    const Shard& own = shards_[me_];
    if (verbatim_) {
      space_.backend.Copy(results_[me_].data(), own.input.data, own.input.bytes());
    } else {
      space_.backend.Encode(job_.codec.down, own.input, own.residual, results_[me_].data(),
                            DrawsOf(job_, job_.codec.down, me_ + 1, own.first_draw));
    }
    Exchange(Stage::kEncode, Stage::kGather, ToAll(results_[me_]), results_);
  }

  // In a gather also this rank's own elements, which nothing has decoded yet.
  void DecodeForeign() {
    const bool gathers = half_ == Half::kGather;
    std::vector<DecodeArgs> shards;
    for (int r = 0; r < n_; ++r) {
      if (r != me_ || gathers) shards.push_back({results_[r].data(), shards_[r].output});
    }
    if (!verbatim_) {
      space_.backend.DecodeAll(job_.codec.down, shards);
    } else if (gathers) {
      const TensorView own = shards_[me_].output;
      space_.backend.Copy(own.data, results_[me_].data(), own.bytes());
    }
    if (operands_) operands_->Store();
  }

  Shard ShardOf(int r) const {
    const Chunk& chunk = *job_.chunk;
    switch (half_) {
      case Half::kBoth: {
        const size_t begin = chunk.shard(r).begin - chunk.elements.begin;
        const size_t numel = chunk.shard(r).end - chunk.shard(r).begin;
        float* const residual = operands_->residual();
        return {operands_->input().Slice(begin, numel), operands_->output().Slice(begin, numel),
                residual == nullptr ? nullptr : residual + begin, begin,
                chunk.codec_offset + begin};
      }
      case Half::kScatter: {
        // Draw numbers begin at a block's border, so each rank's part has its own range of them.
        const size_t part = job_.output.numel;
        const size_t stride = (part + kMaxBlock - 1) / kMaxBlock * kMaxBlock;
        const Range piece = chunk.pieces[r];
        const size_t at = piece.begin - part * r, numel = piece.end - piece.begin;
        return {job_.input.Slice(piece.begin, numel), job_.output.Slice(at, numel),
                ResidualAt(piece.begin), 0, r * stride + at};
      }
      case Half::kGather: break;
    }
    const size_t begin = chunk.elements.begin;
    return {job_.input.Slice(begin, chunk.numel()),
            job_.output.Slice(r * job_.input.numel + begin, chunk.numel()), ResidualAt(begin), 0,
            begin};
  }
  float* ResidualAt(size_t element) const {
    return job_.residual == nullptr ? nullptr : job_.residual + element;
  }
  Range Elements(int r) const { return {shards_[r].begin, shards_[r].begin + Numel(r)}; }
  size_t Numel(int r) const { return shards_[r].input.numel; }

  std::span<const Range> Kept() const override {
    return half_ == Half::kScatter ? job_.chunk->pieces : ChunkRun::Kept();
  }

  // Wire bytes of elements: their own memory if verbatim, else scratch.
  void TakeShards() {
    for (int r = 0; r < n_; ++r) {
      const bool own = r == me_;
      const TensorView input = shards_[r].input;
      outgoing_.push_back(own         ? MutableBytes()
                          : verbatim_ ? BytesOf(input)
                                      : Take(job_.codec.up, input.numel));
      incoming_.push_back(own ? MutableBytes() : Take(job_.codec.up, Numel(me_)));
    }
    scratch_ = TakeReduceScratch(n_, Numel(me_));
  }
  void TakeResults() {
    const auto uneven = [this](const Shard& shard) { return shard.input.numel != Numel(0); };
    if (!verbatim_ && std::none_of(shards_.begin(), shards_.end(), uneven)) {
      results_ = space_.TakeArray(n_, EncodedBytes(job_.codec.down, Numel(0)));
      return;
    }
    for (int r = 0; r < n_; ++r) {
      // A gather's input may overlap the memory that receives another rank's elements.
      const bool in_place = verbatim_ && !(half_ == Half::kGather && r == me_);
      results_.push_back(in_place ? BytesOf(shards_[r].output) : Take(job_.codec.down, Numel(r)));
    }
  }
  MutableBytes Take(const CodecSpec& spec, size_t numel) const {
    return space_.Take(verbatim_ ? numel * sizeof(float) : EncodedBytes(spec, numel));
  }

  const Half half_;
  std::optional<Operands> operands_;  // of a whole allreduce
  std::vector<Shard> shards_;         // by rank
  bool verbatim_ = false;
  std::vector<MutableBytes> results_;   // by rank, each encoded by its owner
  std::vector<MutableBytes> outgoing_;  // by rank r: its shard, encoded by this rank
  std::vector<MutableBytes> incoming_;  // by rank r: this rank's shard, encoded by r
  std::span<float> scratch_;            // for the reduction
};

std::vector<size_t> ShardsOfWholeBlocks(Range chunk, int world, size_t block) {
  const size_t numel = chunk.end - chunk.begin;
  const size_t blocks = (numel + block - 1) / block;
  std::vector<size_t> bounds;
  for (int r = 0; r <= world; ++r) {
    bounds.push_back(chunk.begin + std::min(numel, blocks * r / world * block));
  }
  return bounds;
}

std::vector<size_t> EqualShards(Range chunk, int world, size_t) {
  std::vector<size_t> bounds;
  for (int r = 0; r <= world; ++r) {
    bounds.push_back(chunk.begin + (chunk.end - chunk.begin) / world * r);
  }
  return bounds;
}

std::vector<PhaseCost> CostsOfBoth(const Chunk& chunk, const CodecPair& codec) {
  const auto numel = static_cast<double>(chunk.numel());
  const int peers = chunk.world() - 1;
  const double foreign = static_cast<double>(peers) / chunk.world();
  return {
      {.encoded = numel, .bytes = EncodedBytes(codec.up, chunk.numel()) * foreign, .peers = peers},
      {.reduced = numel,
       .bytes = EncodedBytes(codec.down, chunk.numel()) * foreign,
       .peers = peers},
      {.decoded = numel}};
}

std::vector<PhaseCost> CostsOfScatter(const Chunk& chunk, const CodecPair& codec) {
  std::vector<PhaseCost> costs = CostsOfBoth(chunk, codec);
  return {costs[0], {.reduced = costs[1].reduced}};
}

// A chunk holds one rank's elements; every rank sends as many.
std::vector<PhaseCost> CostsOfGather(const Chunk& chunk, const CodecPair& codec) {
  const auto numel = static_cast<double>(chunk.numel());
  const int peers = chunk.world() - 1;
  const auto bytes = static_cast<double>(EncodedBytes(codec.down, chunk.numel()));
  return {{.encoded = numel, .bytes = bytes * peers, .peers = peers},
          {.decoded = numel * chunk.world()}};
}

}  // namespace

const Algorithm& TwoHop() {
  static constexpr Algorithm kAlgorithm = {
      .name = "two-hop",
      .hops = 2,
      .keeps_residuals = true,
      .begin = BeginRun<TwoHopRun, Half::kBoth>,
      .shard_bounds = ShardsOfWholeBlocks,
      .second_hop = [](const Chunk& chunk, int rank) { return chunk.shard(rank); },
      .costs = CostsOfBoth};
  return kAlgorithm;
}

const Algorithm& ReduceScatter() {
  static constexpr Algorithm kAlgorithm = {.name = "reduce-scatter",
                                           .hops = 1,
                                           .keeps_residuals = true,
                                           .begin = BeginRun<TwoHopRun, Half::kScatter>,
                                           .shard_bounds = EqualShards,
                                           .costs = CostsOfScatter};
  return kAlgorithm;
}

const Algorithm& AllGather() {
  static constexpr Algorithm kAlgorithm = {.name = "all-gather",
                                           .hops = 1,
                                           .keeps_residuals = true,
                                           .begin = BeginRun<TwoHopRun, Half::kGather>,
                                           .costs = CostsOfGather};
  return kAlgorithm;
}

}  // namespace thinwire
