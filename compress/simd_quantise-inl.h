// The block loops of int8 and int4. Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#undef THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "compress/quantiser.h"
#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// With 32 registers of 16 lanes a default block of x stays in registers between the two passes.
inline constexpr size_t kDefaultBlock = 256;
inline constexpr bool kInRegisters = kLanes >= 16;
inline constexpr size_t kVectors = kDefaultBlock / kLanes;

template <bool kFeedback>
HWY_INLINE V LoadX(const float* g, const float* r) {
  const V x = hn::LoadU(F(), g);
  if constexpr (kFeedback) return hn::Add(x, hn::LoadU(F(), r));
  return x;
}

HWY_INLINE hn::Vec<I> Magnitude(V x) {
  return hn::And(hn::BitCast(I(), x), hn::Set(I(), static_cast<int32_t>(kAbsMask)));
}

HWY_INLINE uint32_t Largest(const hn::Vec<I>* m) {
  const auto all = hn::Max(hn::Max(m[0], m[1]), hn::Max(m[2], m[3]));
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I(), all)));
}

// The hardware prefetcher loses track while a block is packed; asking for what comes a few blocks
// later makes up for it once data comes from memory, and costs little in cache.
inline constexpr size_t kPrefetchBytes = 4096;

HWY_INLINE void PrefetchBlock(const void* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    hwy::Prefetch(static_cast<const uint8_t*>(at) + kPrefetchBytes + i);
  }
}

struct BlockScale {
  uint32_t magnitude;
  float scale, inverse;
};

template <int kBits>
HWY_INLINE BlockScale ScaleFor(uint32_t magnitude) {
  const float scale = ScaleOf(magnitude, kBits == 8 ? 127.0f : 7.0f);
  return {magnitude, scale, 1.0f / scale};
}

HWY_INLINE void StoreScale(float scale, uint8_t* at) {
  const uint16_t half = static_cast<uint16_t>(BitsOf(scale) >> 16);
  memcpy(at, &half, sizeof(half));
}

// First pass: the largest magnitude of a block of x(j), j counting vectors.
template <class X>
HWY_INLINE uint32_t LargestOf(size_t vectors, X x) {
  hn::Vec<I> m[4] = {hn::Zero(I()), hn::Zero(I()), hn::Zero(I()), hn::Zero(I())};
  for (size_t j = 0; j < vectors; j += 4) {
    for (size_t t = 0; t < 4; ++t) m[t] = hn::Max(m[t], Magnitude(x(j + t)));
  }
  return Largest(m);
}

// Second pass: quantises x(j), packs the codes, and hands each vector's decoded value to sink(j, x,
// decoded).
template <int kBits, class X, class Sink>
HWY_INLINE void QuantiseBlock(size_t vectors, const BlockScale& s, X x, uint8_t* codes, Sink sink) {
  const V scale = hn::Set(F(), s.scale), inverse = hn::Set(F(), s.inverse);
  constexpr size_t kStep = kGroup<kBits>;
  for (size_t j = 0; j < vectors; j += kStep) {
    hn::Vec<I> k[kStep];
    for (size_t t = 0; t < kStep; ++t) {
      const V value = x(j + t);
      k[t] = RoundToInt(hn::Mul(value, inverse));
      sink(j + t, value, hn::Mul(hn::ConvertTo(F(), k[t]), scale));
    }
    PackGroup<kBits>(k, codes + kLanes * kBits / 8 * j);
  }
}

// A tiny block: scale 0, everything is loss. A block that is not finite: scale NaN, no residual is
// touched. Codes are 0 in both. sink(j, x, kind) for every vector.
template <int kBits, class X, class Sink>
HWY_NOINLINE void SpecialBlock(size_t vectors, uint32_t magnitude, X x, uint8_t* scale,
                               uint8_t* codes, Sink sink) {
  const BlockKind kind = KindOf(magnitude);
  const uint16_t half = kind == BlockKind::kTiny ? 0 : kNanScale;
  memcpy(scale, &half, sizeof(half));
  memset(codes, 0, vectors * kLanes * kBits / 8);
  for (size_t j = 0; j < vectors; ++j) sink(j, x(j), kind);
}

template <int kBits, bool kFeedback>
HWY_NOINLINE void EncodeSpecial(size_t vectors, uint32_t magnitude, const float* g, float* r,
                                uint8_t* scale, uint8_t* codes) {
  SpecialBlock<kBits>(
      vectors, magnitude,
      [&](size_t j) HWY_ATTR { return LoadX<kFeedback>(g + kLanes * j, r + kLanes * j); }, scale,
      codes,
      [&](size_t j, V x, BlockKind kind) HWY_ATTR {
        if (kFeedback && kind == BlockKind::kTiny) hn::StoreU(x, F(), r + kLanes * j);
      });
}

// A default block, read once and kept in registers.
template <int kBits, bool kFeedback>
HWY_INLINE void EncodeInRegisters(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                  uint8_t* HWY_RESTRICT scale, uint8_t* HWY_RESTRICT codes) {
  PrefetchBlock(g, kDefaultBlock * sizeof(float));
  if constexpr (kFeedback) PrefetchBlock(r, kDefaultBlock * sizeof(float));
  V x[kVectors];
  hn::Vec<I> m[4] = {hn::Zero(I()), hn::Zero(I()), hn::Zero(I()), hn::Zero(I())};
#pragma GCC unroll 64
  for (size_t j = 0; j < kVectors; ++j) {
    x[j] = LoadX<kFeedback>(g + kLanes * j, r + kLanes * j);
    m[j % 4] = hn::Max(m[j % 4], Magnitude(x[j]));
  }
  const uint32_t magnitude = Largest(m);
  if (HWY_UNLIKELY(IsSpecial(magnitude))) {
    return EncodeSpecial<kBits, kFeedback>(kVectors, magnitude, g, r, scale, codes);
  }
  const BlockScale s = ScaleFor<kBits>(magnitude);
  StoreScale(s.scale, scale);
  const V vs = hn::Set(F(), s.scale), inverse = hn::Set(F(), s.inverse);
  constexpr size_t kStep = kGroup<kBits>;
#pragma GCC unroll 64
  for (size_t j = 0; j < kVectors; j += kStep) {
    hn::Vec<I> k[kStep];
#pragma GCC unroll 8
    for (size_t t = 0; t < kStep; ++t) {
      k[t] = RoundToInt(hn::Mul(x[j + t], inverse));
      if constexpr (kFeedback) {
        hn::StoreU(hn::Sub(x[j + t], hn::Mul(hn::ConvertTo(F(), k[t]), vs)), F(),
                   r + kLanes * (j + t));
      }
    }
    PackGroup<kBits>(k, codes + kLanes * kBits / 8 * j);
  }
}

// Looks one block ahead: the maximum and the divisions of block b + 1 overlap the packing of b.
template <int kBits, bool kFeedback>
HWY_INLINE void EncodeAhead(const Blocks& blocks, const float* HWY_RESTRICT g,
                            float* HWY_RESTRICT r, uint8_t* HWY_RESTRICT scales,
                            uint8_t* HWY_RESTRICT codes) {
  const size_t block = blocks.block, vectors = block / kLanes;
  const auto head = [&](const float* at, const float* kept) HWY_ATTR {
    return ScaleFor<kBits>(LargestOf(vectors, [&](size_t j) HWY_ATTR {
      return LoadX<kFeedback>(at + kLanes * j, kept + kLanes * j);
    }));
  };
  BlockScale next = head(g, r);
  for (size_t b = 0; b < blocks.count; ++b, g += block, r += kFeedback ? block : 0) {
    const BlockScale s = next;
    PrefetchBlock(g, block * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r, block * sizeof(float));
    if (b + 1 < blocks.count) next = head(g + block, r + (kFeedback ? block : 0));
    uint8_t* scale = scales + 2 * b;
    uint8_t* to = codes + block * kBits / 8 * b;
    if (HWY_UNLIKELY(IsSpecial(s.magnitude))) {
      EncodeSpecial<kBits, kFeedback>(vectors, s.magnitude, g, r, scale, to);
      continue;
    }
    StoreScale(s.scale, scale);
    QuantiseBlock<kBits>(
        vectors, s,
        [&](size_t j) HWY_ATTR { return LoadX<kFeedback>(g + kLanes * j, r + kLanes * j); }, to,
        [&](size_t j, V x, V decoded) HWY_ATTR {
          if constexpr (kFeedback) hn::StoreU(hn::Sub(x, decoded), F(), r + kLanes * j);
        });
  }
}

template <int kBits, bool kFeedback>
HWY_INLINE void EncodeLoop(const Blocks& blocks, const float* g, float* r, uint8_t* scales,
                           uint8_t* codes) {
  if (blocks.count == 0) return;
  if (!kInRegisters || blocks.block != kDefaultBlock) {
    return EncodeAhead<kBits, kFeedback>(blocks, g, r, scales, codes);
  }
  for (size_t b = 0; b < blocks.count; ++b) {
    EncodeInRegisters<kBits, kFeedback>(g + kDefaultBlock * b,
                                        r + (kFeedback ? kDefaultBlock * b : 0), scales + 2 * b,
                                        codes + kDefaultBlock * kBits / 8 * b);
  }
}

HWY_INLINE float LoadScale(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof(half));
  return FloatOf(static_cast<uint32_t>(half) << 16);
}

template <int kBits, bool kAdd>
HWY_INLINE void DecodeLoop(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                           const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  const size_t block = blocks.block;
  for (size_t b = 0; b < blocks.count; ++b, out += block, codes += block * kBits / 8) {
    const Unpacker<kBits> unpack(LoadScale(scales + 2 * b));
    if constexpr (kAdd) PrefetchBlock(out, block * sizeof(float));
#pragma GCC unroll 8
    for (size_t j = 0; j < block / kLanes; ++j) {
      V value = unpack.Values(codes, j);
      if constexpr (kAdd) value = hn::Add(hn::LoadU(F(), out + kLanes * j), value);
      hn::StoreU(value, F(), out + kLanes * j);
    }
  }
}

struct PairArgs {
  const float* own;
  const uint8_t* peer_scales;
  const uint8_t* peer_codes;
  float scale;
  float* r;
  float* out;
  uint8_t* scales;
  uint8_t* codes;
};

// x goes through a buffer in the first-level cache: its maximum must be known before it is coded.
template <int kBits, bool kFeedback>
HWY_INLINE void ReducePairLoop(const Blocks& blocks, const PairArgs& args) {
  const size_t block = blocks.block, vectors = block / kLanes;
  const V mean = hn::Set(F(), args.scale);
  alignas(64) float buffer[4096];
  for (size_t b = 0; b < blocks.count; ++b) {
    const float* HWY_RESTRICT own = args.own + block * b;
    float* HWY_RESTRICT r = kFeedback ? args.r + block * b : nullptr;
    float* HWY_RESTRICT out = args.out + block * b;
    const uint8_t* HWY_RESTRICT peer = args.peer_codes + block * kBits / 8 * b;
    uint8_t* HWY_RESTRICT codes = args.codes + block * kBits / 8 * b;
    const Unpacker<kBits> unpack(LoadScale(args.peer_scales + 2 * b));
    hn::Vec<I> m[4] = {hn::Zero(I()), hn::Zero(I()), hn::Zero(I()), hn::Zero(I())};
    for (size_t j = 0; j < vectors; j += 4) {
#pragma GCC unroll 4
      for (size_t t = 0; t < 4; ++t) {
        V x = hn::Add(hn::LoadU(F(), own + kLanes * (j + t)), unpack.Values(peer, j + t));
        x = hn::Mul(x, mean);
        if constexpr (kFeedback) x = hn::Add(x, hn::LoadU(F(), r + kLanes * (j + t)));
        hn::Store(x, F(), buffer + kLanes * (j + t));
        m[t] = hn::Max(m[t], Magnitude(x));
      }
    }
    const auto x = [&](size_t j) HWY_ATTR { return hn::Load(F(), buffer + kLanes * j); };
    const uint32_t magnitude = Largest(m);
    if (HWY_UNLIKELY(IsSpecial(magnitude))) {
      const float value =
          KindOf(magnitude) == BlockKind::kTiny ? 0.0f : FloatOf(uint32_t{kNanScale} << 16);
      SpecialBlock<kBits>(vectors, magnitude, x, args.scales + 2 * b, codes,
                          [&](size_t j, V v, BlockKind kind) HWY_ATTR {
                            hn::StoreU(hn::Set(F(), value), F(), out + kLanes * j);
                            if (kFeedback && kind == BlockKind::kTiny)
                              hn::StoreU(v, F(), r + kLanes * j);
                          });
      continue;
    }
    const BlockScale s = ScaleFor<kBits>(magnitude);
    StoreScale(s.scale, args.scales + 2 * b);
    QuantiseBlock<kBits>(vectors, s, x, codes, [&](size_t j, V v, V decoded) HWY_ATTR {
      hn::StoreU(decoded, F(), out + kLanes * j);
      if constexpr (kFeedback) hn::StoreU(hn::Sub(v, decoded), F(), r + kLanes * j);
    });
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
