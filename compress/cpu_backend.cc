// The backend that runs: around the codecs' SIMD operations it does what those leave open: other
// dtypes, padding, and the sums of several ranks.
#include <algorithm>
#include <cstring>

#include "compress/backend.h"
#include "compress/codec_info.h"
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
    ZeroPadding(shard, wire);
    const CodecOperations& codec = OperationsOf(spec);
    if (shard.traits.entries()) {
      return codec.entries.encode(spec, gradient, residual, wire, extras);
    }
    const bool direct = gradient.dtype == DType::kF32;
    ForEachPiece(shard, gradient.numel, direct, [&](const Piece& piece) {
      const TensorView part = gradient.Slice(piece.begin, piece.numel);
      float* r = residual == nullptr ? nullptr : residual + piece.begin;
      if (direct) return codec.dense.encode(piece, Floats(part), r, wire);
      StageBuffer values;
      ToFloats(part, values.data());
      codec.dense.encode(piece, values.data(), r, wire);
    });
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const CodecOperations& codec = OperationsOf(spec);
    if (spec.traits().entries()) return codec.entries.decode(spec, wire, out);
    const Shard shard(spec, out.numel);
    const bool direct = out.dtype == DType::kF32;
    ForEachPiece(shard, out.numel, direct, [&](const Piece& piece) {
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
    OperationsOf(spec).dense.decode_add({shard, 0, sum.size()}, wire, sum.data());
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
    const size_t numel = args.own.numel;
    if (numel == 0) return;
    const Shard up(args.up, numel), down(args.down, numel, args.draws);
    if (args.wire_out != nullptr) ZeroPadding(down, args.wire_out);
    const bool direct = args.own.dtype == DType::kF32;  // which `out` has as well
    ForEachPiece(up, numel, direct, [&](const Piece& from) {
      const Piece to(down, from.begin, from.numel);
      const TensorView own = args.own.Slice(from.begin, from.numel);
      const TensorView out = args.out.Slice(from.begin, from.numel);
      if (direct) return ReducePiece(args, from, to, Floats(own), Floats(out));
      StageBuffer values;
      ToFloats(own, values.data());
      ReducePiece(args, from, to, values.data(), values.data());
      FromFloats(values.data(), out);
    });
  }

 private:
  static void ZeroPadding(const Shard& shard, uint8_t* wire) {
    const ShardLayout& layout = shard.layout;
    std::memset(wire + layout.head_bytes, 0, layout.codes_at - layout.head_bytes);
    const size_t end = layout.codes_at + layout.codes_bytes;
    std::memset(wire + end, 0, layout.bytes - end);
  }

  // In one piece where no stage buffer is needed, else in stages.
  template <typename Visit>
  static void ForEachPiece(const Shard& shard, size_t numel, bool direct, Visit visit) {
    const size_t step = direct ? std::max<size_t>(numel, 1) : kStage;
    for (size_t begin = 0; begin < numel; begin += step) {
      visit(Piece(shard, begin, std::min(step, numel - begin)));
    }
  }

  static void ReducePiece(const ReduceArgs& args, const Piece& up, const Piece& down,
                          const float* own, float* out) {
    float* const residual = args.residual == nullptr ? nullptr : args.residual + up.begin;
    const DenseOperations& codec = OperationsOf(args.up).dense;
    size_t done = 0;
    if (codec.reduce != nullptr) {
      done = codec.reduce(up, down,
                          {.wires = args.wires,
                           .own = own,
                           .scale = args.scale,
                           .residual = residual,
                           .out = out,
                           .wire_out = args.wire_out});
    }
    for (; done < up.numel; done += kStage) {
      const size_t count = std::min(kStage, up.numel - done);
      ReduceStage(args, {up.shard, up.begin + done, count}, {down.shard, up.begin + done, count},
                  own + done, out + done);
    }
  }

  // One rank after the other: the combinations of codecs and options that have no loop, and what
  // is behind the last full block or vector.
  static void ReduceStage(const ReduceArgs& args, const Piece& up, const Piece& down,
                          const float* own, float* out) {
    const DenseOperations &from = OperationsOf(args.up).dense, &to = OperationsOf(args.down).dense;
    StageBuffer sum;
    for (size_t r = 0; r < args.wires.size(); ++r) {
      if (args.wires[r] != nullptr) {
        (r == 0 ? from.decode : from.decode_add)(up, args.wires[r], sum.data());
      } else if (r == 0) {
        std::memcpy(sum.data(), own, up.numel * sizeof(float));
      } else {
        simd::Add(sum.data(), own, up.numel);
      }
    }
    simd::Scale(sum.data(), args.scale, up.numel);
    if (args.wire_out == nullptr) {
      std::memcpy(out, sum.data(), up.numel * sizeof(float));
      return;
    }
    to.encode(down, sum.data(), args.residual == nullptr ? nullptr : args.residual + down.begin,
              args.wire_out);
    to.decode(down, args.wire_out, out);
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
