// A world of one: no hop. The mean and the sum of one tensor are that tensor, or its momentum; a
// reduce-scatter and an all-gather of one rank are copies.
#include "schedule/collective/operands.h"
#include "schedule/collective/whole.h"

namespace thinwire {
namespace {

class LocalRun final : public ChunkRun {
 public:
  LocalRun(const ChunkJob& job, const Bench& bench)
      : job_(job), bench_(bench), operands_(job_, bench_) {}

  absl::StatusOr<const Hop*> Advance() override {
    if (absl::Status status = operands_.Load(); !status.ok()) return status;
    const TensorView input = operands_.input();
    bench_.backend.Copy(operands_.output().data, input.data, input.bytes());
    operands_.Store();
    return nullptr;
  }

 private:
  const ChunkJob job_;
  const Bench bench_;
  Operands operands_;
};

}  // namespace

const Algorithm& Local() {
  static const WholeAlgorithm<LocalRun> algorithm("local", 0, false);
  return algorithm;
}

}  // namespace thinwire
