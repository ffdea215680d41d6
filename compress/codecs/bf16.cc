#include "compress/codecs/bf16.h"

#include "compress/codecs/reference.h"
#include "compress/simd_kernels.h"

namespace thinwire::codecs {
namespace {

void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  simd::EncodeBf16(g, r, wire + piece.codes_offset(), piece.numel);
}

void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  simd::FromBf16(wire + piece.codes_offset(), out, piece.numel);
}

void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  const uint8_t* const codes = wire + piece.codes_offset();
  StageBuffer values;
  for (size_t done = 0; done < piece.numel; done += kStage) {
    const size_t count = std::min(kStage, piece.numel - done);
    simd::FromBf16(codes + done * sizeof(Bf16::Code), values.data(), count);
    simd::Add(sum + done, values.data(), count);
  }
}

size_t Reduce(const Piece& up, const Piece& down, const simd::Reduction& args) {
  if (down.shard.spec.id != up.shard.spec.id || args.codes == nullptr) return 0;
  return simd::ReduceBf16(args, up.numel);
}

}  // namespace

const CodecInfo& Bf16::Info() {
  static constexpr CodecInfo info = {
      .traits = kTraits,
      .help = "Each element rounded to bfloat16: half the bytes, close to no loss.",
      .parameters = {},
      .scalar = ReferenceOf<Bf16>(),
      .simd = {.encode = Encode, .decode = Decode, .decode_add = DecodeAdd, .reduce = Reduce}};
  return info;
}

}  // namespace thinwire::codecs
