// A world of one: no hop. The mean and the sum of one tensor are that tensor, or its momentum; a
// reduce-scatter and an all-gather of one rank are copies.
#include "schedule/collective/hop_run.h"
#include "schedule/collective/operands.h"

namespace thinwire {
namespace {

class LocalRun final : public HopRun {
 public:
  LocalRun(const ChunkJob& job, const Bench& bench) : HopRun(job, bench), operands_(job_, bench_) {}

 private:
  absl::Status Work(int) override {
    operands_.Load();
    const TensorView input = operands_.input();
    bench_.backend.Copy(operands_.output().data, input.data, input.bytes());
    operands_.Store();
    return absl::OkStatus();
  }

  Operands operands_;
};

class LocalAlgorithm final : public AlgorithmOf<LocalRun> {
 public:
  using AlgorithmOf::AlgorithmOf;
  std::vector<PhaseCost> Costs(const Chunk&, const CodecPair&) const override { return {{}}; }
};

}  // namespace

const Algorithm& Local() {
  static const LocalAlgorithm algorithm({.name = "local"});
  return algorithm;
}

}  // namespace thinwire
