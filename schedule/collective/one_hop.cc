// One hop: everybody's values go to everybody, who adds the same bytes up in rank order, the own
// ones as they were sent; hence bit-identical replicas. Raw values of small tensors, or the codec's
// with first-hop residuals, where an exchange costs more time than its bytes do.
#include <vector>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/operands.h"

namespace thinwire {
namespace {

enum class Values { kRaw, kEncoded };

class OneHopRun final : public ChunkRun {
 public:
  OneHopRun(const ChunkJob& job, const Bench& bench, Values values)
      : ChunkRun(job, bench),
        operands_(job_, bench_),
        codec_(values == Values::kRaw ? LosslessSpec(operands_.input().dtype) : job.codec.up) {
    const size_t bytes = EncodedBytes(codec_, operands_.input().numel);
    for (int r = 0; r < n_; ++r) wires_.push_back(bench.scratch.Take(bytes));
    scratch_ = TakeReduceScratch(n_, operands_.input().numel);
  }

 private:
  absl::Status Work(int phase) override {
    phase == 0 ? Encode() : AddUp();
    return absl::OkStatus();
  }

  void Encode() {
    operands_.Load({});
    EncodeArgs all = operands_.Encoding({0, operands_.input().numel});
    all.draws = DrawsOf(job_, codec_, me_ + 1, job_.chunk->codec_offset);
    all.wire = wires_[me_].data();
    bench_.backend.EncodeAll(codec_, {&all, 1});
    Exchange(Stage::kEncode, Stage::kExchange, ToAll(wires_[me_]), wires_);
  }

  void AddUp() {
    bench_.backend.Reduce({.up = codec_,
                           .down = LosslessSpec(DType::kF32),
                           .wires = Pointers(wires_),
                           .own = operands_.input(),
                           .scale = job_.scale,
                           .residual = nullptr,
                           .out = operands_.output(),
                           .wire_out = nullptr,
                           .scratch = scratch_});
    operands_.Store();
  }

  Operands operands_;
  const CodecSpec codec_;
  std::vector<MutableBytes> wires_;  // by rank
  std::span<float> scratch_;
};

}  // namespace

const Algorithm& Raw() {
  static constexpr Algorithm kAlgorithm = {
      .name = "raw",
      .hops = 1,
      .begin = BeginRun<OneHopRun, Values::kRaw>,
      .costs = [](const Chunk& chunk, const CodecPair&) {
        return CostsOfOneHop(chunk, {LosslessSpec(DType::kF32), LosslessSpec(DType::kF32)});
      }};
  return kAlgorithm;
}

const Algorithm& OneHop() {
  static constexpr Algorithm kAlgorithm = {.name = "one-hop",
                                           .hops = 1,
                                           .keeps_residuals = true,
                                           .begin = BeginRun<OneHopRun, Values::kEncoded>};
  return kAlgorithm;
}

}  // namespace thinwire
