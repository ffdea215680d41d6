// The backend that runs: SIMD kernels over whole blocks of fp32, and around them what those do not
// know: other dtypes, the block that is not full, padding, and more than two ranks.
#include <algorithm>
#include <array>
#include <cstring>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/hadamard.h"
#include "compress/simd_kernels.h"
#include "compress/simd_target.h"
#include "compress/stages.h"
#include "compress/topk.h"
#include "compress/topk_encode.h"

namespace thinwire {
namespace {

// One shard's codec, and what its blocks need besides.
struct Shard {
  Shard(const CodecSpec& shard_spec, size_t numel, const Draws& shard_draws = {})
      : spec(shard_spec), info(InfoOf(spec.id)), layout(LayoutOf(spec, numel)), draws(shard_draws) {
    if (spec.hadamard) TransformSigns(spec.seed, signs.data());
  }

  const CodecSpec& spec;
  const CodecInfo& info;
  const ShardLayout layout;
  const Draws draws;
  alignas(64) std::array<float, kTransform> signs;
};

// A piece of a shard: elements [begin, begin + numel) of it, begin on a block border.
struct Piece {
  Piece(const Shard& of, size_t first, size_t count) : shard(of), begin(first), numel(count) {
    draws = shard.draws;
    draws.first += begin;
  }

  const Shard& shard;
  const size_t begin, numel;
  Draws draws;

  CodecId id() const { return shard.spec.id; }
  bool in_blocks() const { return shard.info.kind == CodecKind::kBlocks; }
  size_t block() const { return shard.spec.block; }
  size_t full_blocks() const { return in_blocks() ? numel / block() : 0; }
  size_t rest() const { return in_blocks() ? numel % block() : 0; }
  size_t scales_offset() const { return in_blocks() ? begin / block() * sizeof(uint16_t) : 0; }
  size_t codes_offset() const { return shard.layout.codes_at + begin * shard.info.code_bits / 8; }
  size_t codes_bytes() const { return (numel * shard.info.code_bits + 7) / 8; }

  // Its first `count` blocks.
  simd::Blocks blocks(size_t count) const {
    return {.bits = shard.info.code_bits,
            .block = block(),
            .count = count,
            .filled = std::min(numel, block()),
            .draws = shard.spec.rounding == Rounding::kStochastic ? &draws : nullptr,
            .signs = shard.spec.hadamard && numel >= kTransform ? shard.signs.data() : nullptr};
  }
  // The part behind the last full block.
  Piece Tail() const {
    const size_t full = full_blocks() * block();
    return {shard, begin + full, numel - full};
  }
};

// A block that is not full, filled up with zeros, which change neither maximum nor codes.
struct PaddedBlock {
  alignas(64) std::array<float, kMaxBlock> x, r;
  alignas(64) std::array<uint8_t, kMaxBlock> codes;
};

void EncodeTail(const Piece& tail, const float* g, float* r, uint8_t* wire) {
  PaddedBlock padded;
  std::fill_n(padded.x.begin(), tail.block(), 0.0f);
  std::memcpy(padded.x.data(), g, tail.numel * sizeof(float));
  if (r != nullptr) {
    std::fill_n(padded.r.begin(), tail.block(), 0.0f);
    std::memcpy(padded.r.data(), r, tail.numel * sizeof(float));
  }
  simd::EncodeBlocks(tail.blocks(1), padded.x.data(), r == nullptr ? nullptr : padded.r.data(),
                     wire + tail.scales_offset(), padded.codes.data());
  std::memcpy(wire + tail.codes_offset(), padded.codes.data(), tail.codes_bytes());
  if (r != nullptr) std::memcpy(r, padded.r.data(), tail.numel * sizeof(float));
}

void DecodeTail(const Piece& tail, const uint8_t* wire, float* out) {
  PaddedBlock padded;
  padded.codes.fill(0);
  std::memcpy(padded.codes.data(), wire + tail.codes_offset(), tail.codes_bytes());
  simd::DecodeBlocks(tail.blocks(1), wire + tail.scales_offset(), padded.codes.data(),
                     padded.x.data());
  std::memcpy(out, padded.x.data(), tail.numel * sizeof(float));
}

void EncodeFp32(const float* g, float* r, uint8_t* wire, size_t n) {
  std::memcpy(wire, g, n * sizeof(float));
  if (r == nullptr) return;
  // What a peer's NaN or Inf leaves behind is nothing: see FORMAT.md on residuals.
  auto* x = reinterpret_cast<float*>(wire);
  simd::Add(x, r, n);
  for (size_t i = 0; i < n; ++i) {
    float value;
    std::memcpy(&value, wire + i * sizeof(float), sizeof(float));
    if (value - value == 0.0f)
      std::memset(reinterpret_cast<uint8_t*>(r) + i * sizeof(float), 0, sizeof(float));
  }
}

void EncodePiece(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  if (piece.id() == CodecId::kFp32)
    return EncodeFp32(g, r, wire + piece.codes_offset(), piece.numel);
  if (piece.id() == CodecId::kBf16) {
    return simd::EncodeBf16(g, r, wire + piece.codes_offset(), piece.numel);
  }
  simd::EncodeBlocks(piece.blocks(piece.full_blocks()), g, r, wire + piece.scales_offset(),
                     wire + piece.codes_offset());
  if (piece.rest() == 0) return;
  const size_t done = piece.numel - piece.rest();
  EncodeTail(piece.Tail(), g + done, r == nullptr ? nullptr : r + done, wire);
}

void DecodePiece(const Piece& piece, const uint8_t* wire, float* out) {
  const uint8_t* codes = wire + piece.codes_offset();
  if (piece.id() == CodecId::kFp32) {
    std::memcpy(out, codes, piece.numel * sizeof(float));
    return;
  }
  if (piece.id() == CodecId::kBf16) return simd::FromBf16(codes, out, piece.numel);
  simd::DecodeBlocks(piece.blocks(piece.full_blocks()), wire + piece.scales_offset(), codes, out);
  if (piece.rest() > 0) DecodeTail(piece.Tail(), wire, out + piece.numel - piece.rest());
}

void DecodeAddPiece(const Piece& piece, const uint8_t* wire, float* sum) {
  const uint8_t* codes = wire + piece.codes_offset();
  if (piece.id() == CodecId::kFp32)
    return simd::Add(sum, reinterpret_cast<const float*>(codes), piece.numel);
  if (piece.id() == CodecId::kBf16) {
    StageBuffer values;
    simd::FromBf16(codes, values.data(), piece.numel);
    return simd::Add(sum, values.data(), piece.numel);
  }
  simd::DecodeAddBlocks(piece.blocks(piece.full_blocks()), wire + piece.scales_offset(), codes,
                        sum);
  if (piece.rest() == 0) return;
  StageBuffer values;
  DecodeTail(piece.Tail(), wire, values.data());
  simd::Add(sum + piece.numel - piece.rest(), values.data(), piece.rest());
}

// Calls visit(element, value) for every entry of a checked topk shard.
template <typename Visit>
void ForEachEntry(const CodecSpec& spec, const uint8_t* wire, size_t numel, Visit visit) {
  const ShardLayout layout = LayoutOf(spec, numel);
  const uint8_t* entries = wire + layout.codes_at;
  for (size_t b = 0; b < layout.blocks; ++b) {
    const size_t count = Get<uint32_t>(wire, b);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t entry = Get<uint32_t>(entries, i);
      visit(b * kSubBlock + EntryIndex(entry), EntryValue(entry));
    }
    entries += count * sizeof(uint32_t);
  }
}

void DecodeEntries(const CodecSpec& spec, const uint8_t* wire, const TensorView& out) {
  std::memset(out.data, 0, out.bytes());
  ForEachEntry(spec, wire, out.numel,
               [&](size_t i, float value) { FromFloats(&value, out.Slice(i, 1)); });
}

class CpuBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
              const EncodeExtras& extras) const override {
    if (gradient.numel == 0) return;
    const Shard shard(spec, gradient.numel, extras.draws);
    ZeroPadding(shard, wire);
    if (shard.info.kind == CodecKind::kEntries) {
      return EncodeTopK(spec, gradient, residual, wire, extras);
    }
    const bool direct = gradient.dtype == DType::kF32;
    ForEachPiece(shard, gradient.numel, direct, [&](const Piece& piece) {
      const TensorView part = gradient.Slice(piece.begin, piece.numel);
      float* r = residual == nullptr ? nullptr : residual + piece.begin;
      if (direct) return EncodePiece(piece, Floats(part), r, wire);
      StageBuffer values;
      ToFloats(part, values.data());
      EncodePiece(piece, values.data(), r, wire);
    });
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const Shard shard(spec, out.numel);
    if (shard.info.kind == CodecKind::kEntries) return DecodeEntries(spec, wire, out);
    const bool direct = out.dtype == DType::kF32;
    ForEachPiece(shard, out.numel, direct, [&](const Piece& piece) {
      const TensorView part = out.Slice(piece.begin, piece.numel);
      if (direct) return DecodePiece(piece, wire, Floats(part));
      StageBuffer values;
      DecodePiece(piece, wire, values.data());
      FromFloats(values.data(), part);
    });
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    if (InfoOf(spec.id).kind == CodecKind::kEntries) return AddEntries(spec, wire, 1.0f, sum);
    ForEachPiece(
        Shard(spec, sum.size()), sum.size(), spec.id != CodecId::kBf16,
        [&](const Piece& piece) { DecodeAddPiece(piece, wire, sum.data() + piece.begin); });
  }

  void AddEntries(const CodecSpec& spec, const uint8_t* wire, float factor,
                  std::span<float> sum) const override {
    ForEachEntry(spec, wire, sum.size(), [&](size_t i, float value) {
      Put(sum.data(), i, Get<float>(sum.data(), i) + factor * value);
    });
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
    const size_t head = layout.head_bytes(shard.info);
    std::memset(wire + head, 0, layout.codes_at - head);
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
      return InfoOf(spec.id).kind == CodecKind::kBlocks && !spec.hadamard &&
             spec.rounding == Rounding::kNearest;
    };
    return args.wires.size() == 2 && plain(args.up) && plain(args.down) &&
           args.up.block == args.down.block && args.own.dtype == DType::kF32 &&
           simd::HasPairKernel(InfoOf(args.up.id).code_bits, InfoOf(args.down.id).code_bits) &&
           args.wire_out != nullptr;
  }

  // Full blocks only; returns how many elements that were.
  static size_t ReducePair(const ReduceArgs& args, const ShardLayout& up, const ShardLayout& down) {
    const uint8_t* peer = args.wires[args.wires[0] == nullptr ? 1 : 0];
    const simd::PairBlocks blocks{InfoOf(args.up.id).code_bits, InfoOf(args.down.id).code_bits,
                                  args.up.block, args.own.numel / args.up.block};
    simd::ReducePairBlocks(blocks, Floats(args.own), peer, peer + up.codes_at, args.scale,
                           args.residual, Floats(args.out), args.wire_out,
                           args.wire_out + down.codes_at);
    return blocks.count * args.up.block;
  }

  static void ReduceStage(const ReduceArgs& args, const Piece& up, const Piece& down) {
    StageBuffer sum;
    for (size_t r = 0; r < args.wires.size(); ++r) {
      if (args.wires[r] != nullptr) {
        r == 0 ? DecodePiece(up, args.wires[r], sum.data())
               : DecodeAddPiece(up, args.wires[r], sum.data());
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
    EncodePiece(down, sum.data(), args.residual == nullptr ? nullptr : args.residual + down.begin,
                args.wire_out);
    DecodePiece(down, args.wire_out, sum.data());
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
