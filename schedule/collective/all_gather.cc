// The second hop of an allreduce by itself: encode the own elements with their residual, send them
// to everybody, and decode everybody's, the own ones too; hence the same bits on all ranks.
#include <utility>
#include <vector>

#include "schedule/collective/shards.h"
#include "schedule/collective/whole.h"

namespace thinwire {
namespace {

class AllGatherRun final : public ChunkRun {
 public:
  AllGatherRun(const ChunkJob& job, const Bench& bench)
      : job_(job), bench_(bench), verbatim_(IsVerbatim(job.codec.down, job.input.dtype)) {
    bench.scratch.Reset();
    const Range range = job.chunk->elements;
    for (int r = 0; r < bench.members.size; ++r) {
      const size_t at = r * job.input.numel + range.begin;
      outputs_.push_back(job.output.Slice(at, range.end - range.begin));
      const bool in_place = verbatim_ && r != bench.members.rank;
      wires_.push_back(in_place ? BytesOf(outputs_.back()) : bench.scratch.Take(WireBytes()));
    }
  }

  Reception first() const override { return verbatim_ ? Reception() : Reception{Tag(), wires_}; }

  absl::StatusOr<const Hop*> Advance() override {
    if (std::exchange(sent_, true)) return Decode();
    return Encode();
  }

 private:
  uint64_t Tag() const { return HashCombine(job_.tag, 1); }

  absl::StatusOr<const Hop*> Encode() {
    if (!bench_.scratch.status().ok()) return bench_.scratch.status();
    const Range range = job_.chunk->elements;
    const int me = bench_.members.rank;
    if (job_.undo != nullptr) job_.undo->Save(bench_.backend, range, job_.residual, nullptr);
    const TensorView own = job_.input.Slice(range.begin, range.end - range.begin);
    if (verbatim_) {
      bench_.backend.Copy(wires_[me].data(), own.data, own.bytes());
    } else {
      EncodeExtras extras;
      extras.draws = DrawsOf(job_, job_.codec.down, me + 1, range.begin);
      float* const residual = job_.residual == nullptr ? nullptr : job_.residual + range.begin;
      bench_.backend.Encode(job_.codec.down, own, residual, wires_[me].data(), extras);
    }
    send_.assign(wires_.size(), wires_[me]);
    hop_ = {Stage::kEncode, Stage::kGather, Tag(), send_, wires_};
    return &hop_;
  }

  absl::StatusOr<const Hop*> Decode() {
    std::vector<DecodeArgs> shards;
    for (size_t r = 0; r < wires_.size(); ++r) {
      if (!verbatim_) shards.push_back({wires_[r].data(), outputs_[r]});
    }
    const TensorView own = outputs_[bench_.members.rank];
    if (verbatim_) {
      bench_.backend.Copy(own.data, wires_[bench_.members.rank].data(), own.bytes());
    } else {
      bench_.backend.DecodeAll(job_.codec.down, shards);
    }
    return nullptr;
  }

  size_t WireBytes() const {
    const TensorView& part = outputs_.back();
    return verbatim_ ? part.bytes() : EncodedBytes(job_.codec.down, part.numel);
  }

  const ChunkJob job_;
  const Bench bench_;
  const bool verbatim_;
  std::vector<TensorView> outputs_;  // by rank
  std::vector<MutableBytes> wires_;  // by rank
  std::vector<Bytes> send_;
  Hop hop_{};
  bool sent_ = false;
};

}  // namespace

const Algorithm& AllGather() {
  static const WholeAlgorithm<AllGatherRun> algorithm("all-gather", 1, true);
  return algorithm;
}

}  // namespace thinwire
