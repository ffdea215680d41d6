// The normative reference: one element after the other, with the element math that CUDA shares.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/hadamard.h"
#include "compress/half_float.h"
#include "compress/onebit.h"
#include "compress/quantiser.h"
#include "compress/topk.h"
#include "compress/unaligned.h"

namespace thinwire {
namespace {

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
  switch (bits) {
    case 8: codes[i] = static_cast<uint8_t>(code); return;
    case 4: codes[i / 2] |= static_cast<uint8_t>((code & 15) << (i % 2 * 4)); return;
    default: codes[i / 8] |= static_cast<uint8_t>((code < 0) << (i % 8)); return;
  }
}

int GetCode(const uint8_t* codes, int bits, size_t i) {
  if (bits == 8) return static_cast<int8_t>(codes[i]);
  if (bits == 1) return codes[i / 8] >> (i % 8) & 1 ? -1 : 1;
  const int nibble = codes[i / 2] >> (i % 2 * 4) & 15;
  return nibble < 8 ? nibble : nibble - 16;
}

struct BlockRange {
  size_t begin, end;
  size_t count() const { return end - begin; }
};

bool Transforms(const CodecSpec& spec, BlockRange range) {
  return spec.hadamard && range.count() == kTransform;
}

// Forward and back are the same but for where the signs stand.
void Forward(uint64_t seed, float* x) {
  std::array<float, kTransform> signs;
  TransformSigns(seed, signs.data());
  for (size_t i = 0; i < kTransform; ++i) x[i] = x[i] * signs[i];
  Butterflies(x);
}
void Backward(uint64_t seed, float* x) {
  std::array<float, kTransform> signs;
  TransformSigns(seed, signs.data());
  Butterflies(x);
  for (size_t i = 0; i < kTransform; ++i) x[i] = x[i] * signs[i];
}

// What tells a block's kind: onebit's mean magnitude, else the largest one.
uint32_t MagnitudeOf(const CodecSpec& spec, const float* x, size_t count) {
  if (spec.id == CodecId::kOneBit) {
    std::array<float, kSumLanes> lanes{};
    for (size_t i = 0; i < count; ++i) {
      lanes[i % kSumLanes] = lanes[i % kSumLanes] + FloatOf(BitsOf(x[i]) & kAbsMask);
    }
    return BitsOf(MeanOf(FoldLanes(lanes.data()), count));
  }
  uint32_t magnitude = 0;
  for (size_t i = 0; i < count; ++i) magnitude = std::max(magnitude, BitsOf(x[i]) & kAbsMask);
  return magnitude;
}

float BlockScale(const CodecSpec& spec, uint32_t magnitude, bool transformed) {
  if (KindOf(magnitude) == BlockKind::kTiny) return 0.0f;
  if (spec.id == CodecId::kOneBit) return OneBitScale(FloatOf(magnitude));
  if (transformed) magnitude = BitsOf(kClip * FloatOf(magnitude));
  return ScaleOf(magnitude, static_cast<float>(InfoOf(spec.id).qmax));
}

int CodeFor(const CodecSpec& spec, float x, float scale, const Draws& draws, size_t place) {
  if (spec.id == CodecId::kOneBit) return BitsOf(x) >> 31 && scale != 0.0f ? -1 : 1;
  if (scale == 0.0f) return 0;
  const int qmax = InfoOf(spec.id).qmax;
  if (spec.rounding == Rounding::kNearest) return CodeOf(x, 1.0f / scale, qmax);
  return StochasticCodeOf(x, 1.0f / scale, qmax, UniformOf(DrawOf(draws, place)));
}

void EncodeBlock(const CodecSpec& spec, const TensorView& gradient, float* residual,
                 BlockRange range, uint8_t* scale_out, uint8_t* codes, const Draws& draws) {
  std::array<float, kMaxBlock> x;
  const size_t count = range.count();
  for (size_t i = 0; i < count; ++i) x[i] = Input(gradient, residual, range.begin + i);
  const bool transformed = Transforms(spec, range);
  if (transformed) Forward(spec.seed, x.data());
  const uint32_t magnitude = MagnitudeOf(spec, x.data(), count);
  if (KindOf(magnitude) == BlockKind::kNonFinite) return Put(scale_out, 0, kNanScale);
  const float scale = BlockScale(spec, magnitude, transformed);
  Put(scale_out, 0, static_cast<uint16_t>(BitsOf(scale) >> 16));
  for (size_t i = 0; i < count; ++i) {
    const int code = CodeFor(spec, x[i], scale, draws, range.begin + i);
    PutCode(codes, InfoOf(spec.id).code_bits, range.begin + i, code);
    x[i] = ValueOf(code, scale);
  }
  if (residual == nullptr) return;
  if (transformed && IsTransformed(scale)) Backward(spec.seed, x.data());
  for (size_t i = range.begin; i < range.end; ++i) {
    Put(residual, i, Input(gradient, residual, i) - x[i - range.begin]);
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

void DecodeBlock(const CodecSpec& spec, const ShardLayout& layout, const uint8_t* wire,
                 BlockRange range, float* out) {
  const float scale = FromBf16(Get<uint16_t>(wire, range.begin / spec.block));
  for (size_t i = range.begin; i < range.end; ++i) {
    const int code = GetCode(wire + layout.codes_at, InfoOf(spec.id).code_bits, i);
    out[i - range.begin] = ValueOf(code, scale);
  }
  if (Transforms(spec, range) && IsTransformed(scale)) Backward(spec.seed, out);
}

template <typename Visit>
void ForEachBlock(const CodecSpec& spec, size_t numel, Visit visit) {
  for (size_t begin = 0; begin < numel; begin += spec.block) {
    visit(BlockRange{begin, std::min<size_t>(numel, begin + spec.block)});
  }
}

// topk: sorts everything, and takes the first k.
void EncodeEntries(const CodecSpec& spec, const TensorView& gradient, float* residual,
                   uint8_t* wire, const EncodeExtras& extras) {
  const size_t numel = gradient.numel;
  std::vector<float> x(numel), u(numel);
  for (size_t i = 0; i < numel; ++i) {
    x[i] = Load(gradient, i);
    if (extras.velocity != nullptr) {
      u[i] = extras.momentum * Get<float>(extras.velocity, i) + x[i];
      x[i] = extras.nesterov ? x[i] + extras.momentum * u[i] : u[i];
    }
    if (residual != nullptr) x[i] = Get<float>(residual, i) + x[i];
  }
  std::vector<size_t> order(numel);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return SelectionKey(x[a]) > SelectionKey(x[b]); });
  order.resize(EntryCount(spec, numel));
  std::sort(order.begin(), order.end());
  if (residual != nullptr) {
    for (size_t i = 0; i < numel; ++i) {
      if (!StoresResidual(x[i])) continue;
      Put(residual, i, x[i]);
      if (extras.velocity != nullptr) Put(extras.velocity, i, u[i]);
    }
  }
  uint8_t* entries = wire + LayoutOf(spec, numel).codes_at;
  for (size_t e = 0; e < order.size(); ++e) {
    const size_t i = order[e];
    const uint32_t entry = EntryOf(x[i], i);
    Put(entries, e, entry);
    Put(wire, i / kSubBlock, Get<uint32_t>(wire, i / kSubBlock) + 1);
    if (residual == nullptr || !StoresResidual(x[i])) continue;
    Put(residual, i, x[i] - EntryValue(entry));
    if (extras.velocity != nullptr && spec.masking) Put(extras.velocity, i, 0.0f);
  }
}

std::vector<float> DecodeEntries(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  std::vector<float> values(numel);
  const ShardLayout layout = LayoutOf(spec, numel);
  for (size_t b = 0, e = 0; b < layout.blocks; ++b) {
    for (const size_t end = e + Get<uint32_t>(wire, b); e < end; ++e) {
      const uint32_t entry = Get<uint32_t>(wire + layout.codes_at, e);
      values[b * kSubBlock + EntryIndex(entry)] = EntryValue(entry);
    }
  }
  return values;
}

std::vector<float> DecodeValues(const CodecSpec& spec, const uint8_t* wire, size_t numel) {
  std::vector<float> values(numel);
  const ShardLayout layout = LayoutOf(spec, numel);
  switch (InfoOf(spec.id).kind) {
    case CodecKind::kEntries: return DecodeEntries(spec, wire, numel);
    case CodecKind::kElements:
      for (size_t i = 0; i < numel; ++i) {
        values[i] =
            spec.id == CodecId::kFp32 ? Get<float>(wire, i) : FromBf16(Get<uint16_t>(wire, i));
      }
      break;
    case CodecKind::kBlocks:
      ForEachBlock(spec, numel, [&](BlockRange range) {
        DecodeBlock(spec, layout, wire, range, values.data() + range.begin);
      });
  }
  return values;
}

class ScalarBackendImpl final : public Backend {
 public:
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
              const EncodeExtras& extras) const override {
    const ShardLayout layout = LayoutOf(spec, gradient.numel);
    if (gradient.numel == 0) return;
    std::memset(wire, 0, layout.bytes);
    switch (InfoOf(spec.id).kind) {
      case CodecKind::kElements:
        for (size_t i = 0; i < gradient.numel; ++i)
          EncodeElement(spec.id, gradient, residual, wire, i);
        return;
      case CodecKind::kBlocks:
        return ForEachBlock(spec, gradient.numel, [&](BlockRange range) {
          EncodeBlock(spec, gradient, residual, range, wire + range.begin / spec.block * 2,
                      wire + layout.codes_at, extras.draws);
        });
      case CodecKind::kEntries: return EncodeEntries(spec, gradient, residual, wire, extras);
    }
  }

  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const override {
    const std::vector<float> values = DecodeValues(spec, wire, out.numel);
    for (size_t i = 0; i < out.numel; ++i) Store(out, i, values[i]);
  }

  // Of topk only the entries are added: what is not sent leaves even a -0 as it is.
  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override {
    const std::vector<float> values = DecodeValues(spec, wire, sum.size());
    const bool sparse = InfoOf(spec.id).kind == CodecKind::kEntries;
    for (size_t i = 0; i < sum.size(); ++i) {
      if (sparse && values[i] == 0.0f) continue;
      Put(sum.data(), i, Get<float>(sum.data(), i) + values[i]);
    }
  }

  void AddEntries(const CodecSpec& spec, const uint8_t* wire, float factor,
                  std::span<float> sum) const override {
    const std::vector<float> values = DecodeEntries(spec, wire, sum.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      if (values[i] != 0.0f) sum[i] = sum[i] + factor * values[i];
    }
  }

  void Accumulate(TensorView gradient, float factor, std::span<float> sum) const override {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = factor * sum[i] + Load(gradient, i);
  }

  void Reduce(const ReduceArgs& args) const override {
    const size_t numel = args.own.numel;
    std::vector<float> mean(numel);
    for (size_t r = 0; r < args.wires.size(); ++r) {
      const std::vector<float> values = args.wires[r] == nullptr
                                            ? std::vector<float>()
                                            : DecodeValues(args.up, args.wires[r], numel);
      for (size_t i = 0; i < numel; ++i) {
        const float value = values.empty() ? Load(args.own, i) : values[i];
        mean[i] = r == 0 ? value : mean[i] + value;
      }
    }
    for (float& value : mean) value *= args.scale;
    std::vector<uint8_t> wire(EncodedBytes(args.down, numel));
    EncodeExtras extras;
    extras.draws = args.draws;
    Encode(args.down, {mean.data(), numel}, args.residual, wire.data(), extras);
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
