// The normative reference: one element after the other, with the element math that CUDA shares.
#include <algorithm>
#include <cstring>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/half_float.h"
#include "compress/quantiser.h"

namespace thinwire {
namespace {

// Element access at any alignment.
template <typename T>
T Get(const void* base, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(base) + i * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
void Put(void* base, size_t i, T value) {
  std::memcpy(static_cast<uint8_t*>(base) + i * sizeof(T), &value, sizeof(T));
}

float Load(const TensorView& view, size_t i) {
  switch (view.dtype) {
    case DType::kF32: return Get<float>(view.data, i);
    case DType::kBF16: return FromBf16(Get<uint16_t>(view.data, i));
    case DType::kF16: return FromF16(Get<uint16_t>(view.data, i));
  }
  return 0.0f;
}

void Store(const TensorView& view, size_t i, float value) {
  switch (view.dtype) {
    case DType::kF32: return Put(view.data, i, value);
    case DType::kBF16: return Put(view.data, i, ToBf16(value));
    case DType::kF16: return Put(view.data, i, ToF16(value));
  }
}

// x = g + r, or g where there is no feedback.
float Input(const TensorView& gradient, const float* residual, size_t i) {
  const float g = Load(gradient, i);
  return residual == nullptr ? g : g + Get<float>(residual, i);
}

void PutCode(uint8_t* codes, int bits, size_t i, int code) {
  if (bits == 8) {
    codes[i] = static_cast<uint8_t>(code);
  } else {
    codes[i / 2] |= static_cast<uint8_t>((code & 15) << (i % 2 * 4));
  }
}

int GetCode(const uint8_t* codes, int bits, size_t i) {
  if (bits == 8) return static_cast<int8_t>(codes[i]);
  const int nibble = codes[i / 2] >> (i % 2 * 4) & 15;
  return nibble < 8 ? nibble : nibble - 16;
}

struct BlockRange {
  size_t begin, end;
};

void EncodeBlock(const CodecInfo& info, const TensorView& gradient, float* residual,
                 BlockRange range, uint8_t* scale_out, uint8_t* codes) {
  uint32_t magnitude = 0;
  for (size_t i = range.begin; i < range.end; ++i) {
    magnitude = std::max(magnitude, BitsOf(Input(gradient, residual, i)) & kAbsMask);
  }
  const BlockKind kind = KindOf(magnitude);
  if (kind == BlockKind::kNonFinite) return Put(scale_out, 0, kNanScale);
  const float scale =
      kind == BlockKind::kTiny ? 0.0f : ScaleOf(magnitude, static_cast<float>(info.qmax));
  Put(scale_out, 0, static_cast<uint16_t>(BitsOf(scale) >> 16));
  const float inverse = kind == BlockKind::kTiny ? 0.0f : 1.0f / scale;
  for (size_t i = range.begin; i < range.end; ++i) {
    const float x = Input(gradient, residual, i);
    const int code = CodeOf(x, inverse, info.qmax);
    PutCode(codes, info.code_bits, i, code);
    if (residual != nullptr) Put(residual, i, x - ValueOf(code, scale));
  }
}

// bf16 and fp32: each element for itself.
void EncodeElement(CodecId id, const TensorView& gradient, float* residual, uint8_t* wire,
                   size_t i) {
  const float x = Input(gradient, residual, i);
  float kept = 0.0f;
  if (id == CodecId::kFp32) {
    Put(wire, i, x);
  } else {
    const uint16_t half = ToBf16(x);
    Put(wire, i, half);
    kept = x - FromBf16(half);
  }
  // An x that is not finite, or that rounds to Inf, leaves its residual as it was.
  if (residual != nullptr && (BitsOf(kept) & kAbsMask) < kInfBits &&
      (BitsOf(x) & kAbsMask) < kInfBits) {
    Put(residual, i, kept);
  }
}

float DecodeElement(const CodecSpec& spec, const ShardLayout& layout, const uint8_t* wire,
                    size_t i) {
  const CodecInfo& info = InfoOf(spec.id);
  if (spec.id == CodecId::kFp32) return Get<float>(wire, i);
  if (spec.id == CodecId::kBf16) return FromBf16(Get<uint16_t>(wire, i));
  const float scale = FromBf16(Get<uint16_t>(wire, i / spec.block));
  return ValueOf(GetCode(wire + layout.codes_at, info.code_bits, i), scale);
}

class ScalarBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual,
              uint8_t* wire) const override {
    const CodecInfo& info = InfoOf(spec.id);
    const ShardLayout layout = LayoutOf(spec, gradient.numel);
    if (gradient.numel == 0) return;
    std::memset(wire, 0, layout.bytes);
    if (info.qmax == 0) {
      for (size_t i = 0; i < gradient.numel; ++i)
        EncodeElement(spec.id, gradient, residual, wire, i);
      return;
    }
    for (size_t b = 0; b < layout.blocks; ++b) {
      const BlockRange range{b * spec.block,
                             std::min<size_t>(gradient.numel, (b + 1) * spec.block)};
      EncodeBlock(info, gradient, residual, range, wire + 2 * b, wire + layout.codes_at);
    }
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const ShardLayout layout = LayoutOf(spec, out.numel);
    for (size_t i = 0; i < out.numel; ++i) Store(out, i, DecodeElement(spec, layout, wire, i));
  }

  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    const ShardLayout layout = LayoutOf(spec, sum.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      Put(sum.data(), i, Get<float>(sum.data(), i) + DecodeElement(spec, layout, wire, i));
    }
  }

  void Reduce(const ReduceArgs& args) const override {
    const size_t numel = args.own.numel;
    const ShardLayout layout = LayoutOf(args.up, numel);
    std::vector<float> mean(numel);
    for (size_t i = 0; i < numel; ++i) {
      float sum = 0.0f;
      for (size_t r = 0; r < args.wires.size(); ++r) {
        const float value = args.wires[r] == nullptr
                                ? Load(args.own, i)
                                : DecodeElement(args.up, layout, args.wires[r], i);
        sum = r == 0 ? value : sum + value;
      }
      mean[i] = sum * args.scale;
    }
    std::vector<uint8_t> wire(EncodedBytes(args.down, numel));
    Encode(args.down, {mean.data(), numel}, args.residual, wire.data());
    Decode(args.down, wire.data(), args.out);
    if (args.wire_out != nullptr) std::memcpy(args.wire_out, wire.data(), wire.size());
  }
};

}  // namespace

const Backend& ScalarBackend() {
  static const ScalarBackendImpl backend;
  return backend;
}

}  // namespace thinwire
