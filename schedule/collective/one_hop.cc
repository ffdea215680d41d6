// One hop: every rank's bytes go to every rank, which adds them up in rank order, its own as they
// were sent; hence replicas are bit-identical. The bytes are raw values, for small tensors; a
// codec's, with first-hop residuals, for tensors whose exchange costs more time than its bytes; or
// topk's entries.
//
// In a world of one there is no hop. The mean and the sum are the tensor itself, or its momentum; a
// reduce-scatter and an all-gather are copies. Only a divisor of the call scales the tensor.
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/collective/algorithm.h"

namespace thinwire {
namespace {

enum class Values { kRaw, kEncoded };

class OneHopRun final : public ChunkRun {
 public:
  OneHopRun(const ChunkJob& job, Workspace& space, Values values)
      : ChunkRun(job, space),
        operands_(job_, space_),
        codec_(values == Values::kRaw ? LosslessSpec(operands_.input().dtype) : job.codec.up) {
    const size_t bytes = EncodedBytes(codec_, operands_.input().numel);
    for (int r = 0; r < n_; ++r) wires_.push_back(space.Take(bytes));
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
    space_.backend.EncodeAll(codec_, {&all, 1});
    Exchange(Stage::kEncode, Stage::kExchange, ToAll(wires_[me_]), wires_);
  }

  void AddUp() {
    space_.backend.Reduce({.up = codec_,
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

// topk.
class EntriesRun final : public ChunkRun {
 public:
  EntriesRun(const ChunkJob& job, Workspace& space)
      : ChunkRun(job, space), operands_(job_, space_) {
    const size_t numel = operands_.input().numel;
    const size_t bytes = EncodedBytes(job_.codec.up, numel);
    for (int r = 0; r < n_; ++r) wires_.push_back(space.Take(bytes));
    // An fp32 result is summed in place.
    if (operands_.output().dtype != DType::kF32) copy_ = space.TakeOf<float>(numel);
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
    space_.backend.Encode(job_.codec.up,
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
      absl::Status bad = space_.backend.CheckShard(spec, wires[r], output.numel);
      if (!bad.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("rank ", r, " sent what is no topk shard: ", bad.message(),
                         "; look for a network or memory fault on its machine"));
      }
    }
    // Scales each entry, which is cheaper than scaling all elements, most of which are 0.
    space_.backend.SumEntries(spec, wires, job_.scale, sum);
    if (!copy_.empty()) {
      const auto* values = reinterpret_cast<const uint8_t*>(sum.data());
      space_.backend.Decode(LosslessSpec(DType::kF32), values, output);
    }
    operands_.Store();
    return absl::OkStatus();
  }

  Operands operands_;
  std::vector<MutableBytes> wires_;  // by rank
  std::span<float> copy_;
};

// A world of one.
class LocalRun final : public ChunkRun {
 public:
  LocalRun(const ChunkJob& job, Workspace& space) : ChunkRun(job, space), operands_(job_, space_) {}

 private:
  absl::Status Work(int) override {
    operands_.Load();
    const TensorView input = operands_.input();
    if (job_.scale == 1.0f) {
      space_.backend.Copy(operands_.output().data, input.data, input.bytes());
    } else {
      const uint8_t* const own = nullptr;
      space_.backend.Reduce({.up = LosslessSpec(DType::kF32),
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

const Algorithm& Entries() {
  static constexpr Algorithm kAlgorithm = {.name = "entries",
                                           .hops = 1,
                                           .keeps_residuals = true,
                                           .carries = true,
                                           .owns_momentum = true,
                                           .begin = BeginRun<EntriesRun>};
  return kAlgorithm;
}

const Algorithm& Local() {
  static constexpr Algorithm kAlgorithm = {
      .name = "local", .begin = BeginRun<LocalRun>, .costs = [](const Chunk&, const CodecPair&) {
        return std::vector<PhaseCost>(1);
      }};
  return kAlgorithm;
}

}  // namespace thinwire
