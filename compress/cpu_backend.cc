// The backend in normal use. Around the codecs' SIMD operations it handles the rest: other dtypes,
// padding, the sums of several ranks, and the last block if it is not full.
#include <algorithm>
#include <array>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/simd_kernels.h"

namespace thinwire {
namespace {

// Stage by stage, so that a nonzero element is found early.
bool AllZero(std::span<const float> values) {
  constexpr size_t kStage = 1024;
  for (size_t begin = 0; begin < values.size(); begin += kStage) {
    bool zero = true;
    for (const float value : values.subspan(begin, std::min(kStage, values.size() - begin))) {
      zero &= value == 0.0f;
    }
    if (!zero) return false;
  }
  return true;
}

const CodecOperations& OperationsOf(const CodecSpec& spec) { return InfoOf(spec.id).simd; }

// False if the input must be computed in stages: another dtype, or momentum.
bool NeedsNoStage(const EncodeArgs& args) {
  return args.gradient.dtype == DType::kF32 && args.momentum.velocity == nullptr;
}

void LoadStage(const EncodeArgs& args, size_t begin, size_t count, float* to) {
  const TensorView part = args.gradient.Slice(begin, count);
  const Momentum& momentum = args.momentum;
  if (momentum.velocity == nullptr) return ToFloats(part, to);
  const float* g = to;
  if (part.dtype == DType::kF32) {
    g = Floats(part);
  } else {
    ToFloats(part, to);
  }
  simd::ScaledSum(momentum.velocity + begin, momentum.beta, g, to, count);
}

// One Reduce of at least one element: one rank's stage after the other, unless a codec has a loop
// for it. `args` must outlive it.
class CpuReduction {
 public:
  explicit CpuReduction(const ReduceArgs& args);

  void Run();

 private:
  // Up to this many ranks' walks need no allocation.
  static constexpr size_t kRanks = 64;

  void BeginWalks();
  void ReduceAll();
  void ReduceWidths();
  void ReducePiece(const Piece& up, const Piece& down, const float* own, float* out);
  void ReduceStage(const Piece& up, const Piece& down, const float* own, float* out);
  void Sum(const Piece& up, const float* own, float* sum);
  void SumOfTensor(size_t begin, size_t count, float* sum);
  float* ResidualAt(size_t begin) const;

  const ReduceArgs& args_;
  const TensorView own_;  // if the reducer has no shard: the result's memory, never read
  const Shard up_, down_;
  const CodecOperations &from_, &to_;
  const bool direct_;                        // the tensors are fp32
  absl::InlinedVector<Walk, kRanks> walks_;  // kWidths: one over each rank's wire
};

CpuReduction::CpuReduction(const ReduceArgs& args)
    : args_(args),
      own_(args.own.data != nullptr ? args.own : args.out),  // not read then
      up_(args.up, args.own.numel),
      down_(args.down, args.own.numel, args.draws),
      from_(OperationsOf(args.up)),
      to_(OperationsOf(args.down)),
      direct_(args.own.dtype == DType::kF32) {  // `out` has the same dtype
  if (from_.begin != nullptr) walks_.resize(args.wires.size());
}

void CpuReduction::Run() {
  if (args_.wire_out != nullptr) ZeroPadding(down_.layout, args_.wire_out);
  if (to_.heads != nullptr && args_.wire_out != nullptr) {
    ReduceWidths();
  } else {
    ReduceAll();
  }
}

// Codes depend only on their own block. In one piece if no stage buffer is needed.
void CpuReduction::ReduceAll() {
  BeginWalks();
  const size_t numel = own_.numel, step = direct_ ? numel : kStage;
  for (size_t begin = 0; begin < numel; begin += step) {
    const size_t count = std::min(step, numel - begin);
    const Piece up(up_, begin, count), down(down_, begin, count);
    const TensorView own = own_.Slice(begin, count), out = args_.out.Slice(begin, count);
    if (direct_) {
      ReducePiece(up, down, Floats(own), Floats(out));
      continue;
    }
    StageBuffer values;
    ToFloats(own, values.data());
    ReducePiece(up, down, values.data(), values.data());
    FromFloats(values.data(), out);
  }
}

// Codes depend on all heads: the mean is computed once for the heads, and kept in the residual or
// in `out`. Without a residual or fp32 `out`, it is computed again for the codes.
void CpuReduction::ReduceWidths() {
  const size_t numel = own_.numel;
  StageBuffer mean;
  BeginWalks();
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = std::min(kStage, numel - begin);
    SumOfTensor(begin, count, mean.data());
    if (direct_ && args_.residual == nullptr) {
      std::memcpy(Floats(args_.out) + begin, mean.data(), count * sizeof(float));
    }
    to_.heads({down_, begin, count}, mean.data(), ResidualAt(begin), args_.wire_out);
  }
  BeginWalks();
  Walk encoded;
  to_.begin(down_, args_.wire_out, &encoded);
  Walk decoded = encoded;
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = std::min(kStage, numel - begin);
    float* const values = direct_ ? Floats(args_.out) + begin : mean.data();
    if (args_.residual != nullptr) {
      to_.encode_and_decode({down_, begin, count, &encoded}, ResidualAt(begin), args_.wire_out,
                            values);
    } else {
      if (!direct_) SumOfTensor(begin, count, values);
      to_.encode({down_, begin, count, &encoded}, values, nullptr, args_.wire_out);
      to_.decode({down_, begin, count, &decoded}, args_.wire_out, values);
    }
    if (!direct_) FromFloats(values, args_.out.Slice(begin, count));
  }
  ZeroBehind(down_, encoded, args_.wire_out);
}

void CpuReduction::ReducePiece(const Piece& up, const Piece& down, const float* own, float* out) {
  size_t done = 0;
  if (from_.reduce != nullptr) {
    uint8_t* const wire = args_.wire_out;
    done = from_.reduce(up, down,
                        {.wires = args_.wires,
                         .scales_at = up.scales_offset(),
                         .codes_at = up.codes_offset(),
                         .own = own,
                         .scale = args_.scale,
                         .r = ResidualAt(up.begin),
                         .out = out,
                         .scales = wire == nullptr ? nullptr : wire + down.scales_offset(),
                         .codes = wire == nullptr ? nullptr : wire + down.codes_offset()});
  }
  for (; done < up.numel; done += kStage) {
    const size_t count = std::min(kStage, up.numel - done);
    ReduceStage({up_, up.begin + done, count}, {down_, up.begin + done, count}, own + done,
                out + done);
  }
}

// One rank after the other: for the combinations of codecs and options that have no loop, and for
// elements after the last full block or vector.
void CpuReduction::ReduceStage(const Piece& up, const Piece& down, const float* own, float* out) {
  StageBuffer sum;
  Sum(up, own, sum.data());
  if (args_.wire_out == nullptr) {
    std::memcpy(out, sum.data(), up.numel * sizeof(float));
    return;
  }
  to_.encode(down, sum.data(), ResidualAt(down.begin), args_.wire_out);
  to_.decode(down, args_.wire_out, out);
}

// The scaled sum in rank order.
void CpuReduction::Sum(const Piece& up, const float* own, float* sum) {
  for (size_t r = 0; r < args_.wires.size(); ++r) {
    if (args_.wires[r] != nullptr) {
      const Piece piece(up_, up.begin, up.numel, walks_.empty() ? nullptr : &walks_[r]);
      (r == 0 ? from_.decode : from_.decode_add)(piece, args_.wires[r], sum);
    } else if (r == 0) {
      std::memcpy(sum, own, up.numel * sizeof(float));
    } else {
      simd::Add(sum, own, up.numel);
    }
  }
  simd::Scale(sum, args_.scale, up.numel);
}

void CpuReduction::SumOfTensor(size_t begin, size_t count, float* sum) {
  const TensorView own = own_.Slice(begin, count);
  if (direct_) return Sum({up_, begin, count}, Floats(own), sum);
  StageBuffer values;
  ToFloats(own, values.data());
  Sum({up_, begin, count}, values.data(), sum);
}

void CpuReduction::BeginWalks() {
  for (size_t r = 0; r < walks_.size(); ++r) {
    if (args_.wires[r] != nullptr) from_.begin(up_, args_.wires[r], &walks_[r]);
  }
}

float* CpuReduction::ResidualAt(size_t begin) const {
  return args_.residual == nullptr ? nullptr : args_.residual + begin;
}

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
    if (spec.traits().entries()) return OperationsOf(spec).add_entries(spec, wire, 1.0f, sum);
    const Shard shard(spec, sum.size());
    const CodecOperations& codec = OperationsOf(spec);
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    codec.decode_add({shard, 0, sum.size(), &walk}, wire, sum.data());
  }

  void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires, float factor,
                  std::span<float> sum) const override {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (const uint8_t* wire : wires) OperationsOf(spec).add_entries(spec, wire, factor, sum);
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

  // Stage by stage, so that all passes together read and write memory once.
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
    if (spec.traits().entries()) return codec.decode_entries(spec, wire, out);
    if (out.numel == 0) return;
    const Shard shard(spec, out.numel);
    Walk walk;
    if (codec.begin != nullptr) codec.begin(shard, wire, &walk);
    const bool direct = out.dtype == DType::kF32;
    ForEachPiece(shard, out.numel, direct, &walk, [&](const Piece& piece) {
      const TensorView part = out.Slice(piece.begin, piece.numel);
      if (direct) return codec.decode(piece, wire, Floats(part));
      StageBuffer values;
      codec.decode(piece, wire, values.data());
      FromFloats(values.data(), part);
    });
  }

  static void EncodeOne(const CodecSpec& spec, const EncodeArgs& args) {
    const size_t numel = args.gradient.numel;
    if (numel == 0) return;
    const CodecOperations& codec = OperationsOf(spec);
    if (spec.traits().entries()) {
      ZeroPadding(LayoutOf(spec, numel), args.wire);
      return codec.encode_entries(spec, args);
    }
    const Shard shard(spec, numel, args.draws);
    ZeroPadding(shard.layout, args.wire);
    const auto encode = [&](const Piece& piece, const float* x) {
      codec.encode(piece, x, At(args.residual, piece), args.wire);
    };
    if (codec.heads == nullptr) return ForEachPieceOf(shard, args, nullptr, encode);
    ForEachPieceOf(shard, args, nullptr, [&](const Piece& piece, const float* x) {
      codec.heads(piece, x, At(args.residual, piece), args.wire);
    });
    Walk walk;
    codec.begin(shard, args.wire, &walk);
    ForEachPieceOf(shard, args, &walk, encode);
    ZeroBehind(shard, walk, args.wire);
  }

  // In one piece if no stage buffer is needed, else in stages.
  template <typename Visit>
  static void ForEachPiece(const Shard& shard, size_t numel, bool direct, Walk* walk, Visit visit) {
    const size_t step = direct ? numel : kStage;
    for (size_t begin = 0; begin < numel; begin += step) {
      visit(Piece(shard, begin, std::min(step, numel - begin), walk));
    }
  }

  // Calls visit(piece, its elements as fp32).
  template <typename Visit>
  static void ForEachPieceOf(const Shard& shard, const EncodeArgs& args, Walk* walk, Visit visit) {
    const bool direct = NeedsNoStage(args);
    ForEachPiece(shard, args.gradient.numel, direct, walk, [&](const Piece& piece) {
      if (direct) return visit(piece, Floats(args.gradient) + piece.begin);
      StageBuffer values;
      LoadStage(args, piece.begin, piece.numel, values.data());
      visit(piece, values.data());
    });
  }

  static float* At(float* residual, const Piece& piece) {
    return residual == nullptr ? nullptr : residual + piece.begin;
  }
};

}  // namespace

bool Backend::AreZero(std::span<const std::span<const float>> parts, float* known) const {
  if (known != nullptr && *known != 0.0f) return true;
  if (!std::all_of(parts.begin(), parts.end(), AllZero)) return false;
  if (known != nullptr) *known = 1.0f;
  return true;
}

const Backend& CpuBackend() {
  static const CpuBackendImpl backend;
  // Cached: in a virtual machine the query takes longer than a small tensor.
  static const bool available = SimdAvailable();
  return available ? static_cast<const Backend&>(backend) : ScalarBackend();
}

// Operations of codecs of blocks.

namespace codecs {
namespace {

// The first `count` blocks of a piece, for the loops.
simd::Blocks BlocksOf(const Piece& piece, size_t count) {
  const Shard& shard = piece.shard;
  return {.bits = shard.traits.code_bits,
          .block = piece.block(),
          .count = count,
          .filled = std::min(piece.numel, piece.block()),
          .draws = shard.spec.rounding == Rounding::kStochastic ? &piece.draws : nullptr,
          .signs = shard.spec.hadamard && piece.numel >= kTransform ? shard.signs.data() : nullptr};
}

// A block that is not full is padded with zeros, which change neither maximum nor codes.

using PaddedCodes = std::array<uint8_t, kMaxBlock>;

void EncodeTail(const Piece& tail, const float* g, float* r, uint8_t* wire) {
  StageBuffer x, kept;
  alignas(64) PaddedCodes codes;
  std::fill_n(x.begin(), tail.block(), 0.0f);
  std::memcpy(x.data(), g, tail.numel * sizeof(float));
  if (r != nullptr) {
    std::fill_n(kept.begin(), tail.block(), 0.0f);
    std::memcpy(kept.data(), r, tail.numel * sizeof(float));
  }
  simd::EncodeBlocks(BlocksOf(tail, 1), x.data(), r == nullptr ? nullptr : kept.data(),
                     wire + tail.scales_offset(), codes.data());
  std::memcpy(wire + tail.codes_offset(), codes.data(), tail.codes_bytes());
  if (r != nullptr) std::memcpy(r, kept.data(), tail.numel * sizeof(float));
}

void DecodeTail(const Piece& tail, const uint8_t* wire, float* out) {
  StageBuffer x;
  alignas(64) PaddedCodes codes;
  codes.fill(0);
  std::memcpy(codes.data(), wire + tail.codes_offset(), tail.codes_bytes());
  simd::DecodeBlocks(BlocksOf(tail, 1), wire + tail.scales_offset(), codes.data(), x.data());
  std::memcpy(out, x.data(), tail.numel * sizeof(float));
}

}  // namespace

void EncodeSimdBlocks(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  simd::EncodeBlocks(BlocksOf(piece, piece.full_blocks()), g, r, wire + piece.scales_offset(),
                     wire + piece.codes_offset());
  if (piece.rest() == 0) return;
  const size_t done = piece.numel - piece.rest();
  EncodeTail(piece.Tail(), g + done, r == nullptr ? nullptr : r + done, wire);
}

void DecodeSimdBlocks(const Piece& piece, const uint8_t* wire, float* out) {
  simd::DecodeBlocks(BlocksOf(piece, piece.full_blocks()), wire + piece.scales_offset(),
                     wire + piece.codes_offset(), out);
  if (piece.rest() > 0) DecodeTail(piece.Tail(), wire, out + piece.numel - piece.rest());
}

void DecodeAddSimdBlocks(const Piece& piece, const uint8_t* wire, float* sum) {
  simd::DecodeAddBlocks(BlocksOf(piece, piece.full_blocks()), wire + piece.scales_offset(),
                        wire + piece.codes_offset(), sum);
  if (piece.rest() == 0) return;
  StageBuffer values;
  DecodeTail(piece.Tail(), wire, values.data());
  simd::Add(sum + piece.numel - piece.rest(), values.data(), piece.rest());
}

size_t ReduceSimdBlocks(const Piece& up, const Piece& down, const simd::Reduction& args) {
  const auto plain = [](const CodecSpec& spec) {
    return !spec.hadamard && spec.rounding == Rounding::kNearest;
  };
  const simd::Blocks blocks = BlocksOf(up, up.full_blocks());
  const int down_bits = down.shard.traits.code_bits;
  if (!down.in_blocks() || down.block() != up.block() || !plain(up.shard.spec) ||
      !plain(down.shard.spec) || !simd::HasReduceLoop(blocks.bits, down_bits) ||
      args.codes == nullptr) {
    return 0;
  }
  simd::ReduceBlocks(blocks, down_bits, args);
  return blocks.count * blocks.block;
}

}  // namespace codecs
}  // namespace thinwire
