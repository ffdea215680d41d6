// One hop: everybody's values go to everybody, who adds the same bytes up in rank order, the own
// ones as they were sent; hence bit-identical replicas. Raw values of small tensors, or the codec's
// with first-hop residuals, where an exchange costs more time than its bytes do.
#include <utility>
#include <vector>

#include "schedule/collective/operands.h"
#include "schedule/collective/shards.h"
#include "schedule/collective/whole.h"

namespace thinwire {
namespace {

enum class Values { kRaw, kEncoded };

template <Values kValues>
class OneHopRun final : public ChunkRun {
 public:
  OneHopRun(const ChunkJob& job, const Bench& bench)
      : job_(job),
        bench_(bench),
        operands_(job_, bench_),
        codec_(kValues == Values::kRaw ? LosslessSpec(operands_.input().dtype) : job.codec.up) {
    const size_t bytes = EncodedBytes(codec_, operands_.input().numel);
    for (int r = 0; r < bench.members.size; ++r) wires_.push_back(bench.scratch.Take(bytes));
  }

  absl::StatusOr<const Hop*> Advance() override {
    if (std::exchange(sent_, true)) return AddUp();
    if (absl::Status status = operands_.Load({}); !status.ok()) return status;
    const int me = bench_.members.rank;
    EncodeArgs all = operands_.Encoding({0, operands_.input().numel});
    all.extras.draws = DrawsOf(job_, codec_, me + 1, job_.chunk->codec_offset);
    all.wire = wires_[me].data();
    bench_.backend.EncodeAll(codec_, {&all, 1});
    send_.assign(wires_.size(), wires_[me]);
    hop_ = {Stage::kEncode, Stage::kExchange, HashCombine(job_.tag, 1), send_, wires_};
    return &hop_;
  }

 private:
  absl::StatusOr<const Hop*> AddUp() {
    std::vector<const uint8_t*> wires;
    for (const MutableBytes& wire : wires_) wires.push_back(wire.data());
    bench_.backend.Reduce({.up = codec_,
                           .down = LosslessSpec(DType::kF32),
                           .wires = wires,
                           .own = operands_.input(),
                           .scale = job_.scale,
                           .residual = nullptr,
                           .out = operands_.output(),
                           .wire_out = nullptr});
    operands_.Store();
    return nullptr;
  }

  const ChunkJob job_;
  const Bench bench_;
  Operands operands_;
  const CodecSpec codec_;
  std::vector<MutableBytes> wires_;  // by rank
  std::vector<Bytes> send_;
  Hop hop_{};
  bool sent_ = false;
};

}  // namespace

const Algorithm& Raw() {
  static const WholeAlgorithm<OneHopRun<Values::kRaw>> algorithm("raw", 1, false);
  return algorithm;
}

const Algorithm& OneHop() {
  static const WholeAlgorithm<OneHopRun<Values::kEncoded>> algorithm("one-hop", 1, true);
  return algorithm;
}

}  // namespace thinwire
