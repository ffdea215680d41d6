// The backend that runs: SIMD kernels over whole blocks of fp32, and around them what those do not
// know: other dtypes, the block that is not full, padding, and more than two ranks.
#include <algorithm>
#include <array>
#include <cstring>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/simd_kernels.h"
#include "compress/simd_target.h"

namespace thinwire {
namespace {

// Tensors that are not plain fp32 pass through the first-level cache in stages of this many
// elements: whole blocks of any codec, unless the tensor ends.
inline constexpr size_t kStage = kMaxBlock;
using StageBuffer = std::array<float, kStage>;

float* Floats(const TensorView& view) { return static_cast<float*>(view.data); }

void ToFloats(const TensorView& view, float* out) {
  const auto* in = static_cast<const uint8_t*>(view.data);
  switch (view.dtype) {
    case DType::kF32: std::memcpy(out, in, view.bytes()); return;
    case DType::kBF16: return simd::FromBf16(in, out, view.numel);
    case DType::kF16: return simd::FromF16(in, out, view.numel);
  }
}

void FromFloats(const float* in, const TensorView& view) {
  auto* out = static_cast<uint8_t*>(view.data);
  switch (view.dtype) {
    case DType::kF32: std::memcpy(out, in, view.bytes()); return;
    case DType::kBF16: return simd::EncodeBf16(in, nullptr, out, view.numel);
    case DType::kF16: return simd::ToF16(in, out, view.numel);
  }
}

// A piece of a shard: elements [begin, begin + numel) of it, begin on a block border.
struct Piece {
  const CodecSpec& spec;
  const CodecInfo& info;
  size_t begin, numel;
  size_t codes_at;  // of the shard

  size_t full_blocks() const { return info.qmax == 0 ? 0 : numel / spec.block; }
  size_t rest() const { return info.qmax == 0 ? 0 : numel % spec.block; }
  size_t scales_offset() const { return info.qmax == 0 ? 0 : begin / spec.block * 2; }
  size_t codes_offset() const { return codes_at + begin * info.code_bits / 8; }
  simd::Blocks blocks(size_t count) const { return {info.code_bits, spec.block, count}; }

  // The part behind the last full block.
  Piece Tail() const {
    const size_t full = full_blocks() * spec.block;
    return {spec, info, begin + full, numel - full, codes_at};
  }
  size_t codes_bytes() const { return (numel * info.code_bits + 7) / 8; }
};

// A block that is not full, filled up with zeros, which change neither maximum nor codes.
struct PaddedBlock {
  alignas(64) std::array<float, kMaxBlock> x, r;
  alignas(64) std::array<uint8_t, kMaxBlock> codes;
};

void EncodeTail(const Piece& tail, const float* g, float* r, uint8_t* wire) {
  PaddedBlock padded;
  std::fill_n(padded.x.begin(), tail.spec.block, 0.0f);
  std::memcpy(padded.x.data(), g, tail.numel * sizeof(float));
  if (r != nullptr) {
    std::fill_n(padded.r.begin(), tail.spec.block, 0.0f);
    std::memcpy(padded.r.data(), r, tail.numel * sizeof(float));
  }
  simd::EncodeBlocks(tail.blocks(1), padded.x.data(), r == nullptr ? nullptr : padded.r.data(),
                     wire + tail.scales_offset(), padded.codes.data());
  std::memcpy(wire + tail.codes_offset(), padded.codes.data(), tail.codes_bytes());
  if (r != nullptr) std::memcpy(r, padded.r.data(), tail.numel * sizeof(float));
}

void DecodeTail(const Piece& tail, const uint8_t* wire, float* out) {
  PaddedBlock padded;
  std::fill_n(padded.codes.begin(), tail.spec.block * tail.info.code_bits / 8, uint8_t{0});
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
  if (piece.spec.id == CodecId::kFp32)
    return EncodeFp32(g, r, wire + piece.codes_offset(), piece.numel);
  if (piece.spec.id == CodecId::kBf16) {
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
  if (piece.spec.id == CodecId::kFp32) {
    std::memcpy(out, codes, piece.numel * sizeof(float));
    return;
  }
  if (piece.spec.id == CodecId::kBf16) return simd::FromBf16(codes, out, piece.numel);
  simd::DecodeBlocks(piece.blocks(piece.full_blocks()), wire + piece.scales_offset(), codes, out);
  if (piece.rest() > 0) DecodeTail(piece.Tail(), wire, out + piece.numel - piece.rest());
}

void DecodeAddPiece(const Piece& piece, const uint8_t* wire, float* sum) {
  const uint8_t* codes = wire + piece.codes_offset();
  if (piece.spec.id == CodecId::kFp32)
    return simd::Add(sum, reinterpret_cast<const float*>(codes), piece.numel);
  if (piece.spec.id == CodecId::kBf16) {
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

class CpuBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual,
              uint8_t* wire) const override {
    if (gradient.numel == 0) return;
    const ShardLayout layout = LayoutOf(spec, gradient.numel);
    ZeroPadding(layout, wire);
    const bool direct = gradient.dtype == DType::kF32;
    ForEachPiece(spec, layout, gradient.numel, direct, [&](const Piece& piece) {
      const TensorView part = gradient.Slice(piece.begin, piece.numel);
      float* r = residual == nullptr ? nullptr : residual + piece.begin;
      if (direct) return EncodePiece(piece, Floats(part), r, wire);
      StageBuffer values;
      ToFloats(part, values.data());
      EncodePiece(piece, values.data(), r, wire);
    });
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const ShardLayout layout = LayoutOf(spec, out.numel);
    const bool direct = out.dtype == DType::kF32;
    ForEachPiece(spec, layout, out.numel, direct, [&](const Piece& piece) {
      const TensorView part = out.Slice(piece.begin, piece.numel);
      if (direct) return DecodePiece(piece, wire, Floats(part));
      StageBuffer values;
      DecodePiece(piece, wire, values.data());
      FromFloats(values.data(), part);
    });
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    ForEachPiece(
        spec, LayoutOf(spec, sum.size()), sum.size(), spec.id != CodecId::kBf16,
        [&](const Piece& piece) { DecodeAddPiece(piece, wire, sum.data() + piece.begin); });
  }

  void Reduce(const ReduceArgs& args) const override {
    const size_t numel = args.own.numel;
    if (numel == 0) return;
    const ShardLayout up = LayoutOf(args.up, numel), down = LayoutOf(args.down, numel);
    if (args.wire_out != nullptr) ZeroPadding(down, args.wire_out);
    size_t done = 0;
    if (IsPair(args)) done = ReducePair(args, up);
    for (; done < numel; done += kStage) {
      const size_t count = std::min(kStage, numel - done);
      ReduceStage(args, {args.up, InfoOf(args.up.id), done, count, up.codes_at},
                  {args.down, InfoOf(args.down.id), done, count, down.codes_at});
    }
  }

 private:
  static void ZeroPadding(const ShardLayout& layout, uint8_t* wire) {
    std::memset(wire + layout.blocks * 2, 0, layout.codes_at - layout.blocks * 2);
    const size_t end = layout.codes_at + layout.codes_bytes;
    std::memset(wire + end, 0, layout.bytes - end);
  }

  // In one piece where no stage buffer is needed, else in stages.
  template <typename Visit>
  static void ForEachPiece(const CodecSpec& spec, const ShardLayout& layout, size_t numel,
                           bool direct, Visit visit) {
    const size_t step = direct ? std::max<size_t>(numel, 1) : kStage;
    for (size_t begin = 0; begin < numel; begin += step) {
      visit(Piece{spec, InfoOf(spec.id), begin, std::min(step, numel - begin), layout.codes_at});
    }
  }

  // Two ranks, one quantiser, fp32: the case to be fast in. Its sum has one order only.
  static bool IsPair(const ReduceArgs& args) {
    return args.wires.size() == 2 && args.up == args.down && InfoOf(args.up.id).qmax != 0 &&
           args.own.dtype == DType::kF32 && args.wire_out != nullptr;
  }

  // Full blocks only; returns how many elements that were.
  static size_t ReducePair(const ReduceArgs& args, const ShardLayout& layout) {
    const uint8_t* peer = args.wires[args.wires[0] == nullptr ? 1 : 0];
    const size_t full = args.own.numel / args.up.block;
    const simd::Blocks blocks{InfoOf(args.up.id).code_bits, args.up.block, full};
    simd::ReducePairBlocks(blocks, Floats(args.own), peer, peer + layout.codes_at, args.scale,
                           args.residual, Floats(args.out), args.wire_out,
                           args.wire_out + layout.codes_at);
    return full * args.up.block;
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
  return SimdAvailable() ? static_cast<const Backend&>(backend) : ScalarBackend();
}

}  // namespace thinwire
