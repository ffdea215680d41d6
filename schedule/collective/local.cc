// A world of one: no hop. The mean and the sum of one tensor are that tensor, or its momentum; a
// reduce-scatter and an all-gather of one rank are copies. Only a divisor of the call scales it.
#include "schedule/collective/algorithm.h"
#include "schedule/collective/operands.h"

namespace thinwire {
namespace {

class LocalRun final : public ChunkRun {
 public:
  LocalRun(const ChunkJob& job, const Bench& bench)
      : ChunkRun(job, bench), operands_(job_, bench_) {}

 private:
  absl::Status Work(int) override {
    operands_.Load();
    const TensorView input = operands_.input();
    if (job_.scale == 1.0f) {
      bench_.backend.Copy(operands_.output().data, input.data, input.bytes());
    } else {
      const uint8_t* const own = nullptr;
      bench_.backend.Reduce({.up = LosslessSpec(DType::kF32),
                             .down = LosslessSpec(DType::kF32),
                             .wires = {&own, 1},
                             .own = input,
                             .scale = job_.scale,
                             .out = operands_.output()});
    }
    operands_.Store();
    return absl::OkStatus();
  }

  Operands operands_;
};

}  // namespace

const Algorithm& Local() {
  static constexpr Algorithm kAlgorithm = {
      .name = "local", .begin = BeginRun<LocalRun>, .costs = [](const Chunk&, const CodecPair&) {
        return std::vector<PhaseCost>(1);
      }};
  return kAlgorithm;
}

}  // namespace thinwire
