// The normative reference: one element after the other, with the element math that CUDA shares.
// Implements any codec of elements and any codec of blocks with the members of its type.
#ifndef THINWIRE_COMPRESS_CODECS_REFERENCE_H_
#define THINWIRE_COMPRESS_CODECS_REFERENCE_H_

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "compress/codec_info.h"
#include "compress/codecs/onebit.h"
#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

// Access to single elements of a tensor of any dtype and alignment.
inline float Load(const TensorView& view, size_t i) {
  switch (view.dtype) {
    case DType::kF32: return Get<float>(view.data, i);
    case DType::kBF16: return FromBf16(Get<uint16_t>(view.data, i));
    case DType::kF16: return FromF16(Get<uint16_t>(view.data, i));
  }
  return 0.0f;
}

inline void Store(const TensorView& view, size_t i, float value) {
  switch (view.dtype) {
    case DType::kF32: return Put(view.data, i, value);
    case DType::kBF16: return Put(view.data, i, ToBf16(value));
    case DType::kF16: return Put(view.data, i, ToF16(value));
  }
}

namespace codecs {

// x = g + r, or g without feedback.
inline float InputAt(const float* g, const float* r, size_t i) {
  return r == nullptr ? Get<float>(g, i) : Get<float>(g, i) + Get<float>(r, i);
}

template <typename Codec>
class ReferenceElements {
 public:
  static void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
    for (size_t i = 0; i < piece.numel; ++i) {
      const float x = InputAt(g, r, i);
      const typename Codec::Code code = Codec::CodeOf(x);
      Put(wire + piece.codes_offset(), i, code);
      const float kept = x - Codec::ValueOf(code);
      // If x or its loss is not finite, the residual is unchanged.
      if (r != nullptr && IsFinite(kept) && IsFinite(x)) Put(r, i, kept);
    }
  }
  static void Decode(const Piece& piece, const uint8_t* wire, float* out) {
    for (size_t i = 0; i < piece.numel; ++i) Put(out, i, ValueAt(piece, wire, i));
  }
  static void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
    for (size_t i = 0; i < piece.numel; ++i) {
      Put(sum, i, Get<float>(sum, i) + ValueAt(piece, wire, i));
    }
  }

 private:
  static float ValueAt(const Piece& piece, const uint8_t* wire, size_t i) {
    return Codec::ValueOf(Get<typename Codec::Code>(wire + piece.codes_offset(), i));
  }
};

template <typename Codec>
class ReferenceBlocks {
 public:
  static void Encode(const Piece& piece, const float* g, float* r, uint8_t* wire) {
    std::memset(wire + piece.codes_offset(), 0, piece.codes_bytes());
    ForEachBlock(piece, [&](const Block& block) { EncodeBlock(piece, block, g, r, wire); });
  }
  static void Decode(const Piece& piece, const uint8_t* wire, float* out) {
    ForEachBlock(piece, [&](const Block& block) {
      Values values;
      DecodeBlock(piece, block, wire, values.data());
      for (size_t i = 0; i < block.count; ++i) Put(out, block.begin + i, values[i]);
    });
  }
  static void DecodeAdd(const Piece& piece, const uint8_t* wire, float* sum) {
    ForEachBlock(piece, [&](const Block& block) {
      Values values;
      DecodeBlock(piece, block, wire, values.data());
      for (size_t i = 0; i < block.count; ++i) {
        Put(sum, block.begin + i, Get<float>(sum, block.begin + i) + values[i]);
      }
    });
  }

 private:
  static constexpr int kBits = Codec::kTraits.code_bits;
  static_assert(kBits == 1 || kBits == 2 || kBits == 4 || kBits == 8, "a code lies in one byte");
  using Values = std::array<float, kMaxBlock>;

  // A block of a piece; `begin` counts from the piece's first element.
  struct Block {
    size_t begin, count;
    size_t number(const Piece& piece) const { return begin / piece.block(); }
    bool transforms(const Piece& piece) const {
      return Codec::kTransforms && piece.shard.spec.hadamard && count == kTransform;
    }
  };

  template <typename Visit>
  static void ForEachBlock(const Piece& piece, Visit visit) {
    for (size_t begin = 0; begin < piece.numel; begin += piece.block()) {
      visit(Block{begin, std::min(piece.block(), piece.numel - begin)});
    }
  }

  static uint32_t MagnitudeOf(const float* x, size_t count) {
    if constexpr (Codec::kMean) {
      std::array<float, kSumLanes> lanes{};
      for (size_t i = 0; i < count; ++i) {
        lanes[i % kSumLanes] = lanes[i % kSumLanes] + FloatOf(BitsOf(x[i]) & kAbsMask);
      }
      return BitsOf(MeanOf(FoldLanes(lanes.data()), count));
    } else {
      uint32_t magnitude = 0;
      for (size_t i = 0; i < count; ++i) magnitude = std::max(magnitude, BitsOf(x[i]) & kAbsMask);
      return magnitude;
    }
  }

  static float ScaleFor(uint32_t magnitude, bool transformed) {
    if (KindOf(magnitude) == BlockKind::kTiny) return 0.0f;
    if (transformed) magnitude = BitsOf(kClip * FloatOf(magnitude));
    return Codec::PlainScale(magnitude);
  }

  // `i` counts from the piece's first element.
  static int CodeFor(const Piece& piece, float x, float scale, size_t i) {
    if (scale == 0.0f) return Codec::kTinyCode;
    if constexpr (Codec::kStochastic) {
      if (piece.shard.spec.rounding == Rounding::kStochastic) {
        return Codec::StochasticCodeFor(x, 1.0f / scale, UniformOf(DrawOf(piece.draws, i)));
      }
    }
    return Codec::CodeFor(x, 1.0f / scale);
  }

  // Codes are two's complement, the first in the lowest bits; a code of one bit is the sign.
  static void PutCode(uint8_t* codes, size_t i, int code) {
    const unsigned bits = kBits == 1 ? code < 0 : static_cast<unsigned>(code) & ((1u << kBits) - 1);
    codes[i * kBits / 8] |= static_cast<uint8_t>(bits << (i * kBits % 8));
  }
  static int GetCode(const uint8_t* codes, size_t i) {
    const int bits = codes[i * kBits / 8] >> (i * kBits % 8) & ((1 << kBits) - 1);
    if (kBits == 1) return bits != 0 ? -1 : 1;
    return bits < 1 << (kBits - 1) ? bits : bits - (1 << kBits);
  }

  // The sign is not applied as a factor: for a NaN scale, the sign of a product depends on the CPU.
  static float ValueFor(int code, float scale) {
    if (kBits == 1) return FloatOf(BitsOf(scale) ^ (code < 0 ? ~kAbsMask : 0));
    return ValueOf(code, scale);
  }

  // The transform and its inverse differ in where the signs are applied.
  static void Forward(const Piece& piece, float* x) {
    for (size_t i = 0; i < kTransform; ++i) x[i] = x[i] * piece.shard.signs[i];
    Butterflies(x);
  }
  static void Backward(const Piece& piece, float* x) {
    Butterflies(x);
    for (size_t i = 0; i < kTransform; ++i) x[i] = x[i] * piece.shard.signs[i];
  }

  static void EncodeBlock(const Piece& piece, const Block& block, const float* g, float* r,
                          uint8_t* wire) {
    Values x;
    for (size_t i = 0; i < block.count; ++i) x[i] = InputAt(g, r, block.begin + i);
    const bool transformed = block.transforms(piece);
    if (transformed) Forward(piece, x.data());
    uint8_t* const scales = wire + piece.scales_offset();
    uint32_t magnitude = MagnitudeOf(x.data(), block.count);
    if (transformed) magnitude = TransformedMagnitude(magnitude);
    if (KindOf(magnitude) == BlockKind::kNonFinite) {
      return Put(scales, block.number(piece), kNanScale);
    }
    const float scale = ScaleFor(magnitude, transformed);
    Put(scales, block.number(piece), static_cast<uint16_t>(BitsOf(scale) >> 16));
    for (size_t i = 0; i < block.count; ++i) {
      const int code = CodeFor(piece, x[i], scale, block.begin + i);
      PutCode(wire + piece.codes_offset(), block.begin + i, code);
      x[i] = ValueFor(code, scale);
    }
    if (r == nullptr) return;
    if (transformed && IsTransformed(scale)) Backward(piece, x.data());
    for (size_t i = 0; i < block.count; ++i) {
      Put(r, block.begin + i, InputAt(g, r, block.begin + i) - x[i]);
    }
  }

  static void DecodeBlock(const Piece& piece, const Block& block, const uint8_t* wire, float* out) {
    const float scale = FromBf16(Get<uint16_t>(wire + piece.scales_offset(), block.number(piece)));
    for (size_t i = 0; i < block.count; ++i) {
      out[i] = ValueFor(GetCode(wire + piece.codes_offset(), block.begin + i), scale);
    }
    if (block.transforms(piece) && IsTransformed(scale)) Backward(piece, out);
  }
};

// The reference operations of a codec, by its kind.
template <typename Codec>
constexpr CodecOperations ReferenceOf() {
  using Reference = std::conditional_t<Codec::kTraits.kind == CodecKind::kBlocks,
                                       ReferenceBlocks<Codec>, ReferenceElements<Codec>>;
  return {
      .encode = Reference::Encode, .decode = Reference::Decode, .decode_add = Reference::DecodeAdd};
}

}  // namespace codecs
}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODECS_REFERENCE_H_
