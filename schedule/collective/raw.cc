// A small tensor: one hop. Everybody sends its values to everybody, and sums in rank order.
#include <utility>
#include <vector>

#include "schedule/collective/operands.h"
#include "schedule/collective/shards.h"
#include "schedule/collective/whole.h"

namespace thinwire {
namespace {

class RawRun final : public ChunkRun {
 public:
  RawRun(const ChunkJob& job, const Bench& bench)
      : job_(job),
        bench_(bench),
        operands_(job_, bench_),
        codec_(LosslessSpec(operands_.input().dtype)) {
    const size_t bytes = EncodedBytes(codec_, operands_.input().numel);
    for (int r = 0; r < bench.members.size; ++r) wires_.push_back(bench.scratch.Take(bytes));
  }

  absl::StatusOr<const Hop*> Advance() override {
    if (std::exchange(sent_, true)) return AddUp();
    if (absl::Status status = operands_.Load(); !status.ok()) return status;
    const MutableBytes own = wires_[bench_.members.rank];
    bench_.backend.Encode(codec_, operands_.input(), nullptr, own.data());
    send_.assign(wires_.size(), own);
    hop_ = {Stage::kEncode, Stage::kExchange, HashCombine(job_.tag, 1), send_, wires_};
    return &hop_;
  }

 private:
  absl::StatusOr<const Hop*> AddUp() {
    std::vector<const uint8_t*> wires;
    for (const MutableBytes& wire : wires_) wires.push_back(wire.data());
    wires[bench_.members.rank] = nullptr;
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
  const CodecSpec codec_;            // whose wire bytes the raw values are
  std::vector<MutableBytes> wires_;  // by rank
  std::vector<Bytes> send_;
  Hop hop_{};
  bool sent_ = false;
};

}  // namespace

const Algorithm& Raw() {
  static const WholeAlgorithm<RawRun> algorithm("raw", 1, false);
  return algorithm;
}

}  // namespace thinwire
