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

  void Reduce(const ReduceArgs& args) const override {
    const size_t numel = args.own.numel;
    if (numel == 0) return;
    const Shard up(args.up, numel), down(args.down, numel, args.draws);
    if (args.wire_out != nullptr) ZeroPadding(down, args.wire_out);
    size_t done = 0;
    if (IsPair(args)) done = ReducePair(args, up.layout, down.layout);
    for (; done < numel; done += kStage) {
      const size_t count = std::min(kStage, numel - done);
      ReduceStage(args, {up, done, count}, {down, done, count});
    }
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

  // Two ranks, plain quantisers, fp32: the case to be fast in. Its sum has one order only.
  static bool IsPair(const ReduceArgs& args) {
    const auto plain = [](const CodecSpec& spec) {
      return !spec.hadamard && spec.rounding == Rounding::kNearest;
    };
    return args.wires.size() == 2 && plain(args.up) && plain(args.down) &&
           args.up.block == args.down.block && args.own.dtype == DType::kF32 &&
           simd::HasPairKernel(PairBits(args.up), PairBits(args.down)) && args.wire_out != nullptr;
  }

  static int PairBits(const CodecSpec& spec) { return OperationsOf(spec).dense.pair_bits; }

  // Full blocks only; returns how many elements that were.
  static size_t ReducePair(const ReduceArgs& args, const ShardLayout& up, const ShardLayout& down) {
    const uint8_t* peer = args.wires[args.wires[0] == nullptr ? 1 : 0];
    const simd::PairBlocks blocks{PairBits(args.up), PairBits(args.down), args.up.block,
                                  args.own.numel / args.up.block};
    simd::ReducePairBlocks(blocks, Floats(args.own), peer, peer + up.codes_at, args.scale,
                           args.residual, Floats(args.out), args.wire_out,
                           args.wire_out + down.codes_at);
    return blocks.count * args.up.block;
  }

  static void ReduceStage(const ReduceArgs& args, const Piece& up, const Piece& down) {
    const DenseOperations &from = OperationsOf(args.up).dense, &to = OperationsOf(args.down).dense;
    StageBuffer sum;
    for (size_t r = 0; r < args.wires.size(); ++r) {
      if (args.wires[r] != nullptr) {
        (r == 0 ? from.decode : from.decode_add)(up, args.wires[r], sum.data());
        continue;
      }
      const TensorView own = args.own.Slice(up.begin, up.numel);
      if (r == 0) {
        ToFloats(own, sum.data());
      } else if (own.dtype == DType::kF32) {
        simd::Add(sum.data(), Floats(own), own.numel);
      } else {
        StageBuffer values;
        ToFloats(own, values.data());
        simd::Add(sum.data(), values.data(), own.numel);
      }
    }
    simd::Scale(sum.data(), args.scale, up.numel);
    const TensorView out = args.out.Slice(up.begin, up.numel);
    if (args.wire_out == nullptr) return FromFloats(sum.data(), out);
    to.encode(down, sum.data(), args.residual == nullptr ? nullptr : args.residual + down.begin,
              args.wire_out);
    to.decode(down, args.wire_out, sum.data());
    FromFloats(sum.data(), out);
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
