// The backend that runs: around the codecs' SIMD operations it does what those leave open: other
// dtypes, padding, and the sums of several ranks.
#include <algorithm>
#include <cstring>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/cpu_reduce.h"
#include "compress/piece.h"
#include "compress/simd_kernels.h"
#include "compress/simd_target.h"
#include "compress/stages.h"

namespace thinwire {
namespace {

const CodecOperations& OperationsOf(const CodecSpec& spec) { return InfoOf(spec.id).simd; }

// The values to encode: a gradient, or the momentum that it makes, which only a stage ever holds.
struct Input {
  // fp32 that need no stage.
  bool direct() const { return gradient.dtype == DType::kF32 && momentum.velocity == nullptr; }

  void Load(size_t begin, size_t count, float* to) const {
    const TensorView part = gradient.Slice(begin, count);
    if (momentum.velocity == nullptr) return ToFloats(part, to);
    const float* g = to;
    if (part.dtype == DType::kF32) {
      g = Floats(part);
    } else {
      ToFloats(part, to);
    }
    simd::ScaledSum(momentum.velocity + begin, momentum.beta, g, to, count);
  }

  const TensorView& gradient;
  const Momentum momentum = {};
};

class CpuBackendImpl final : public Backend {
 public:
  void EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const override {
    for (const EncodeArgs& shard : shards) EncodeOne(spec, shard);
  }

  void DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const override {
    for (const DecodeArgs& shard : shards) DecodeOne(spec, shard.wire, shard.out);
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    if (sum.empty()) return;
    if (spec.traits().entries()) return OperationsOf(spec).entries.add(spec, wire, 1.0f, sum);
    const Shard shard(spec, sum.size());
    const DenseOperations& codec = OperationsOf(spec).dense;
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode_add({shard, 0, sum.size(), &walk}, wire, sum.data());
  }

  void EncodeEntries(const CodecSpec& spec, const EntryArgs& args) const override {
    if (args.gradient.numel == 0) return;
    ZeroPadding(LayoutOf(spec, args.gradient.numel), args.wire);
    OperationsOf(spec).entries.encode(spec, args);
  }

  void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires, float factor,
                  std::span<float> sum) const override {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (const uint8_t* wire : wires) OperationsOf(spec).entries.add(spec, wire, factor, sum);
  }

  void CopyFinite(std::span<const float> from, std::span<float> to) const override {
    simd::CopyFinite(from.data(), to.data(), to.size());
  }

  void Accumulate(TensorView gradient, float factor, std::span<const float> base,
                  std::span<float> sum) const override {
    ForEachStage(gradient, [&](const float* g, size_t begin, size_t n) {
      simd::ScaledSum(base.data() + begin, factor, g, sum.data() + begin, n);
    });
  }

  // Stage by stage, so that memory is read and written once for all passes.
  void EndMomentum(const Momentum& momentum, std::span<float> all, TensorView out) const override {
    for (size_t begin = 0; begin < all.size(); begin += kStage) {
      const size_t count = std::min(kStage, all.size() - begin);
      float* const m = all.data() + begin;
      float* const velocity = momentum.velocity + begin;
      StageBuffer g;
      if (momentum.nesterov) simd::ScaledSum(velocity, -momentum.beta, m, g.data(), count);
      simd::CopyFinite(m, velocity, count);
      if (momentum.nesterov) simd::ScaledSum(m, momentum.beta, g.data(), m, count);
      FromFloats(m, out.Slice(begin, count));
    }
  }

  void Reduce(const ReduceArgs& args) const override {
    if (args.own.numel > 0) CpuReduction(args).Run();
  }

 private:
  static void DecodeOne(const CodecSpec& spec, const uint8_t* wire, TensorView out) {
    const CodecOperations& codec = OperationsOf(spec);
    if (spec.traits().entries()) return codec.entries.decode(spec, wire, out);
    if (out.numel == 0) return;
    const Shard shard(spec, out.numel);
    Walk walk;
    if (codec.dense.begin != nullptr) codec.dense.begin(shard, wire, &walk);
    const bool direct = out.dtype == DType::kF32;
    ForEachPiece(shard, out.numel, direct, &walk, [&](const Piece& piece) {
      const TensorView part = out.Slice(piece.begin, piece.numel);
      if (direct) return codec.dense.decode(piece, wire, Floats(part));
      StageBuffer values;
      codec.dense.decode(piece, wire, values.data());
      FromFloats(values.data(), part);
    });
  }

  void EncodeOne(const CodecSpec& spec, const EncodeArgs& args) const {
    if (spec.traits().entries()) {
      return EncodeEntries(spec, {args.gradient, args.residual, args.wire});
    }
    const size_t numel = args.gradient.numel;
    if (numel == 0) return;
    const Shard shard(spec, numel, args.draws);
    ZeroPadding(shard.layout, args.wire);
    const CodecOperations& codec = OperationsOf(spec);
    const Input input{args.gradient, args.momentum};
    const auto encode = [&](const Piece& piece, const float* x) {
      codec.dense.encode(piece, x, At(args.residual, piece), args.wire);
    };
    if (codec.dense.heads == nullptr) return ForEachPieceOf(shard, input, nullptr, encode);
    ForEachPieceOf(shard, input, nullptr, [&](const Piece& piece, const float* x) {
      codec.dense.heads(piece, x, At(args.residual, piece), args.wire);
    });
    Walk walk;
    codec.dense.begin(shard, args.wire, &walk);
    ForEachPieceOf(shard, input, &walk, encode);
    ZeroBehind(shard, walk, args.wire);
  }

  // In one piece where no stage buffer is needed, else in stages.
  template <typename Visit>
  static void ForEachPiece(const Shard& shard, size_t numel, bool direct, Walk* walk, Visit visit) {
    const size_t step = direct ? numel : kStage;
    for (size_t begin = 0; begin < numel; begin += step) {
      visit(Piece(shard, begin, std::min(step, numel - begin), walk));
    }
  }

  // Calls visit(piece, its elements as fp32).
  template <typename Visit>
  static void ForEachPieceOf(const Shard& shard, const Input& input, Walk* walk, Visit visit) {
    const bool direct = input.direct();
    ForEachPiece(shard, input.gradient.numel, direct, walk, [&](const Piece& piece) {
      if (direct) return visit(piece, Floats(input.gradient) + piece.begin);
      StageBuffer values;
      input.Load(piece.begin, piece.numel, values.data());
      visit(piece, values.data());
    });
  }

  static float* At(float* residual, const Piece& piece) {
    return residual == nullptr ? nullptr : residual + piece.begin;
  }
};

}  // namespace

const Backend& CpuBackend() {
  static const CpuBackendImpl backend;
  // Asked once: in a virtual machine the question alone takes longer than a small tensor.
  static const bool available = SimdAvailable();
  return available ? static_cast<const Backend&>(backend) : ScalarBackend();
}

}  // namespace thinwire
