// topk: one hop. Everybody's entries go to everybody, who adds the same entries up in the same
// order, the own ones as they were sent; hence bit-identical replicas.
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/operands.h"

namespace thinwire {
namespace {

class EntriesRun final : public ChunkRun {
 public:
  EntriesRun(const ChunkJob& job, const Bench& bench)
      : ChunkRun(job, bench), operands_(job_, bench_) {
    const size_t numel = operands_.input().numel;
    const size_t bytes = EncodedBytes(job_.codec.up, numel);
    for (int r = 0; r < n_; ++r) wires_.push_back(bench.scratch.Take(bytes));
    // The result is summed in its own place, if that is fp32.
    if (operands_.output().dtype != DType::kF32) copy_ = bench.scratch.TakeOf<float>(numel);
  }

  Reception first() const override { return {Tag(1), wires_}; }

 private:
  absl::Status Work(int phase) override {
    if (phase == 1) return AddUp();
    Encode();
    return absl::OkStatus();
  }

  void Encode() {
    operands_.Load();
    bench_.backend.EncodeEntries(job_.codec.up,
                                 {.gradient = operands_.input(),
                                  .residual = operands_.residual(),
                                  .wire = wires_[me_].data(),
                                  .threshold = job_.carried,
                                  .momentum = job_.momentum.From(job_.chunk->elements.begin)});
    Exchange(Stage::kEncode, Stage::kGather, ToAll(wires_[me_]), wires_);
  }

  absl::Status AddUp() {
    const CodecSpec& spec = job_.codec.up;
    const TensorView output = operands_.output();
    const std::span<float> sum =
        copy_.empty() ? std::span<float>(static_cast<float*>(output.data), output.numel) : copy_;
    const std::vector<const uint8_t*> wires = Pointers(wires_);
    for (size_t r = 0; r < wires.size(); ++r) {
      absl::Status bad = bench_.backend.CheckShard(spec, wires[r], output.numel);
      if (!bad.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("rank ", r, " sent what is no topk shard: ", bad.message(),
                         "; look for a network or memory fault on its machine"));
      }
    }
    // Each entry is scaled, which is less than to scale all elements, most of which are 0.
    bench_.backend.SumEntries(spec, wires, job_.scale, sum);
    if (!copy_.empty()) {
      const auto* values = reinterpret_cast<const uint8_t*>(sum.data());
      bench_.backend.Decode(LosslessSpec(DType::kF32), values, output);
    }
    operands_.Store();
    return absl::OkStatus();
  }

  Operands operands_;
  std::vector<MutableBytes> wires_;  // by rank
  std::span<float> copy_;
};

}  // namespace

const Algorithm& Entries() {
  static constexpr Algorithm kAlgorithm = {.name = "entries",
                                           .hops = 1,
                                           .keeps_residuals = true,
                                           .carries = true,
                                           .owns_momentum = true,
                                           .begin = BeginRun<EntriesRun>};
  return kAlgorithm;
}

}  // namespace thinwire
