#include "compress/codecs/simd_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "compress/simd_kernels.h"

namespace thinwire::codecs {
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
  simd::EncodeBlocks(BlocksOf(tail, 1), padded.x.data(), r == nullptr ? nullptr : padded.r.data(),
                     wire + tail.scales_offset(), padded.codes.data());
  std::memcpy(wire + tail.codes_offset(), padded.codes.data(), tail.codes_bytes());
  if (r != nullptr) std::memcpy(r, padded.r.data(), tail.numel * sizeof(float));
}

void DecodeTail(const Piece& tail, const uint8_t* wire, float* out) {
  PaddedBlock padded;
  padded.codes.fill(0);
  std::memcpy(padded.codes.data(), wire + tail.codes_offset(), tail.codes_bytes());
  simd::DecodeBlocks(BlocksOf(tail, 1), wire + tail.scales_offset(), padded.codes.data(),
                     padded.x.data());
  std::memcpy(out, padded.x.data(), tail.numel * sizeof(float));
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
  const simd::RankBlocks blocks{up.shard.traits.code_bits, down.shard.traits.code_bits, up.block(),
                                up.full_blocks()};
  if (!down.in_blocks() || down.block() != up.block() || !plain(up.shard.spec) ||
      !plain(down.shard.spec) || !simd::HasReduceLoop(blocks.up, blocks.down) ||
      args.codes == nullptr) {
    return 0;
  }
  simd::ReduceBlocks(blocks, args);
  return blocks.count * blocks.block;
}

}  // namespace thinwire::codecs
