// topk: one hop. Everybody's entries go to everybody, who adds the same entries up in the same
// order, the own ones as they were sent; hence bit-identical replicas.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/collective/operands.h"
#include "schedule/collective/whole.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

class EntriesRun final : public ChunkRun {
 public:
  EntriesRun(const ChunkJob& job, const Bench& bench)
      : job_(job), bench_(bench), operands_(job_, bench_) {
    const size_t bytes = EncodedBytes(job_.codec.up, operands_.input().numel);
    for (int r = 0; r < bench.members.size; ++r) wires_.push_back(bench.scratch.Take(bytes));
  }

  Reception first() const override { return {Tag(), wires_}; }

  absl::StatusOr<const Hop*> Advance() override {
    if (std::exchange(sent_, true)) return AddUp();
    return Encode();
  }

 private:
  uint64_t Tag() const { return HashCombine(job_.tag, 1); }

  absl::StatusOr<const Hop*> Encode() {
    const CodecSpec& spec = job_.codec.up;
    const TensorView input = operands_.input();
    // The result is summed in its own place, if that is fp32.
    if (operands_.output().dtype != DType::kF32) copy_ = bench_.scratch.TakeOf<float>(input.numel);
    EncodeExtras extras;
    extras.threshold = job_.carried;
    extras.scratch =
        bench_.scratch.TakeOf<uint32_t>(bench_.backend.EntryScratchWords(spec, input.numel));
    extras.velocity =
        job_.velocity == nullptr ? nullptr : job_.velocity + job_.chunk->elements.begin;
    extras.momentum = job_.momentum.beta;
    extras.nesterov = job_.momentum.nesterov;
    if (absl::Status status = operands_.Load(); !status.ok()) return status;
    const MutableBytes own = wires_[bench_.members.rank];
    bench_.backend.Encode(spec, input, operands_.residual(), own.data(), extras);
    send_.assign(wires_.size(), own);
    hop_ = {Stage::kEncode, Stage::kGather, Tag(), send_, wires_};
    return &hop_;
  }

  absl::StatusOr<const Hop*> AddUp() {
    const CodecSpec& spec = job_.codec.up;
    const TensorView output = operands_.output();
    const std::span<float> sum =
        copy_.empty() ? std::span<float>(static_cast<float*>(output.data), output.numel) : copy_;
    std::vector<const uint8_t*> wires;
    for (size_t r = 0; r < wires_.size(); ++r) {
      wires.push_back(wires_[r].data());
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
    return nullptr;
  }

  const ChunkJob job_;
  const Bench bench_;
  Operands operands_;
  std::vector<MutableBytes> wires_;  // by rank
  std::span<float> copy_;
  std::vector<Bytes> send_;
  Hop hop_{};
  bool sent_ = false;
};

}  // namespace

const Algorithm& Entries() {
  static const WholeAlgorithm<EntriesRun> algorithm("entries", 1, true);
  return algorithm;
}

}  // namespace thinwire
