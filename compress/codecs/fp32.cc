#include "compress/codecs/fp32.h"

#include <cstring>

#include "compress/codecs/reference.h"
#include "compress/simd_kernels.h"

namespace thinwire::codecs {
namespace {

void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
  uint8_t* const codes = wire + piece.codes_offset();
  std::memcpy(codes, g, piece.numel * sizeof(float));
  if (r == nullptr) return;
  simd::Add(reinterpret_cast<float*>(codes), r, piece.numel);
  // A NaN or Inf leaves its residual unchanged: see FORMAT.md on residuals.
  for (size_t i = 0; i < piece.numel; ++i) {
    const float x = Get<float>(codes, i);
    if (x - x == 0.0f) Put(r, i, 0.0f);
  }
}

void Decode(const Piece& piece, const uint8_t* wire, float* out) {
  std::memcpy(out, wire + piece.codes_offset(), piece.numel * sizeof(float));
}

void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
  simd::Add(sum, reinterpret_cast<const float*>(wire + piece.codes_offset()), piece.numel);
}

size_t Reduce(const Piece& up, const Piece& /*down*/, const simd::Reduction& args) {
  if (args.codes != nullptr) return 0;
  return simd::ReduceFp32(args, up.numel);
}

}  // namespace

const CodecInfo& Fp32::Info() {
  static constexpr CodecInfo info = {
      .traits = kTraits,
      .help = "The elements themselves: the baseline, and the choice for small tensors.",
      .parameters = {},
      .scalar = ReferenceOf<Fp32>(),
      .simd = {.encode = Encode, .decode = Decode, .decode_add = DecodeAdd, .reduce = Reduce}};
  return info;
}

}  // namespace thinwire::codecs
