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

class CpuBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
              const EncodeExtras& extras) const override {
    if (gradient.numel == 0) return;
    const Shard shard(spec, gradient.numel, extras.draws);
    ZeroPadding(shard.layout, wire);
    const CodecOperations& codec = OperationsOf(spec);
    if (shard.traits.entries()) {
      return codec.entries.encode(spec, gradient, residual, wire, extras);
    }
    if (codec.dense.heads == nullptr) {
      return ForEachPieceOf(shard, gradient, nullptr, [&](const Piece& piece, const float* g) {
        codec.dense.encode(piece, g, At(residual, piece), wire);
      });
    }
    ForEachPieceOf(shard, gradient, nullptr, [&](const Piece& piece, const float* g) {
      codec.dense.heads(piece, g, At(residual, piece), wire);
    });
    Walk walk;
    codec.dense.begin(shard, wire, &walk);
    ForEachPieceOf(shard, gradient, &walk, [&](const Piece& piece, const float* g) {
      codec.dense.encode(piece, g, At(residual, piece), wire);
    });
    ZeroBehind(shard, walk, wire);
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
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

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    if (sum.empty()) return;
    if (spec.traits().entries()) return AddEntries(spec, wire, 1.0f, sum);
    const Shard shard(spec, sum.size());
    const DenseOperations& codec = OperationsOf(spec).dense;
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode_add({shard, 0, sum.size(), &walk}, wire, sum.data());
  }

  void AddEntries(const CodecSpec& spec, const uint8_t* wire, float factor,
                  std::span<float> sum) const override {
    OperationsOf(spec).entries.add(spec, wire, factor, sum);
  }

  void Accumulate(TensorView gradient, float factor, std::span<float> sum) const override {
    ForEachStage(gradient, [&](const float* g, size_t begin, size_t n) {
      simd::AddScaled(sum.data() + begin, factor, g, n);
    });
  }

  void CopyFinite(std::span<const float> from, std::span<float> to) const override {
    simd::CopyFinite(from.data(), to.data(), to.size());
  }

  void Reduce(const ReduceArgs& args) const override {
    if (args.own.numel > 0) CpuReduction(args).Run();
  }

 private:
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
  static void ForEachPieceOf(const Shard& shard, const TensorView& gradient, Walk* walk,
                             Visit visit) {
    const bool direct = gradient.dtype == DType::kF32;
    ForEachPiece(shard, gradient.numel, direct, walk, [&](const Piece& piece) {
      const TensorView part = gradient.Slice(piece.begin, piece.numel);
      if (direct) return visit(piece, Floats(part));
      StageBuffer values;
      ToFloats(part, values.data());
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
