// The encoding and decoding loops of int8, int4 and onebit, rounding to nearest. Included once per
// target.
#if defined(THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#undef THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <type_traits>

#include "compress/codecs/onebit.h"
#include "compress/element_math.h"
#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// With 32 registers of 16 lanes a default block of x stays in registers between the two passes.
inline constexpr size_t kDefaultBlock = 256;
inline constexpr bool kInRegisters = kLanes >= 16;
inline constexpr size_t kVectors = kDefaultBlock / kLanes;

// The vector at element `i`. Without feedback `r` is null and not read.
template <bool kFeedback>
HWY_INLINE V LoadX(const float* g, const float* r, size_t i) {
  const V x = hn::LoadU(F(), g + i);
  if constexpr (kFeedback) return hn::Add(x, hn::LoadU(F(), r + i));
  return x;
}

HWY_INLINE hn::Vec<I> Magnitude(V x) {
  return hn::And(hn::BitCast(I(), x), hn::Set(I(), static_cast<int32_t>(kAbsMask)));
}

// The hardware prefetcher loses track while a block is packed; prefetching one block ahead
// compensates for that if data comes from memory, and costs little in cache. It is one block and
// not several, since loops this fast need the near lines first (decision 9).
inline constexpr size_t kPrefetchBytes = 1024;

HWY_INLINE void PrefetchBlock(const void* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    hwy::Prefetch(static_cast<const uint8_t*>(at) + kPrefetchBytes + i);
  }
}

// A block's scale, and the magnitude that determines its kind. Values that depend on the scale stay
// in vector registers: moving them to a general register and back takes longer than a division.
// Members have one size: the compiler copies a struct with several sizes through memory, where the
// next load must wait for stores that it does not match.
struct BlockScale {
  hn::Vec<I> magnitudes;
  V scale, inverse;  // in every lane

  HWY_INLINE uint32_t magnitude() const { return static_cast<uint32_t>(hn::GetLane(magnitudes)); }
};

HWY_INLINE V InAllLanes(hn::Vec<hn::CappedTag<float, 4>> v) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_broadcastss_ps(v.raw)};
#elif HWY_TARGET == HWY_AVX2
  return V{_mm256_broadcastss_ps(v.raw)};
#else
  return v;  // the same value in all four lanes
#endif
}

template <class W>
HWY_INLINE auto FirstFour(W v) {
  if constexpr (hn::MaxLanes(hn::DFromV<W>()) > 4) {
    return FirstFour(hn::LowerHalf(v));
  } else {
    return v;
  }
}

// `magnitude` in every lane. Step 4 of FORMAT.md.
template <int kBits>
HWY_INLINE BlockScale ScaleFor(hn::Vec<I> magnitude) {
  // A division of the longest vectors takes as long as two of shorter ones.
  const hn::CappedTag<float, 4> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const auto step =
      hn::Div(FirstFour(hn::BitCast(F(), magnitude)), hn::Set(d, kBits == 8 ? 127.0f : 7.0f));
  const auto up = hn::Add(hn::BitCast(du, step), hn::Set(du, 0xffffu));
  const auto scale = hn::BitCast(d, hn::And(up, hn::Set(du, 0xffff0000u)));
  return {magnitude, InAllLanes(scale), InAllLanes(hn::Div(hn::Set(d, 1.0f), scale))};
}

// Adds halves repeatedly: the order of FoldLanes.
template <class W>
HWY_INLINE float FoldVector(W v) {
  using DW = hn::DFromV<W>;
  if constexpr (hn::MaxLanes(DW()) > 4) {
    const hn::Half<DW> half;
    return FoldVector(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    const auto two = hn::Add(v, hn::Shuffle1032(v));
    return hn::GetLane(hn::Add(two, hn::Shuffle2301(two)));
  }
}

// First pass over a block: its largest magnitude, or onebit's mean magnitude.
template <int kBits>
class Head {
 public:
  HWY_INLINE Head() {
    for (size_t i = 0; i < kParts; ++i) part_[i] = hn::Zero(D());
  }

  // Vector j of the block; j must be a compile-time constant, or the parts go through memory.
  HWY_INLINE void Add(size_t j, V x) {
    auto& part = part_[j % kParts];
    if constexpr (kBits == 1) {
      part = hn::Add(part, hn::Abs(x));
    } else {
      part = hn::Max(part, Magnitude(x));
    }
  }

  // `count`: the block's elements without padding.
  HWY_INLINE BlockScale Finish(size_t count) {
    for (size_t width = kParts / 2; width > 0; width /= 2) {
      for (size_t i = 0; i < width; ++i) part_[i] = Fold(part_[i], part_[i + width]);
    }
    if constexpr (kBits == 1) {
      const float mean = MeanOf(FoldVector(part_[0]), count);
      return {hn::BitCast(I(), hn::Set(F(), mean)), hn::Set(F(), OneBitScale(mean)), hn::Zero(F())};
    } else {
      return ScaleFor<kBits>(hn::MaxOfLanes(D(), part_[0]));
    }
  }

 private:
  using D = std::conditional_t<kBits == 1, F, I>;
  static constexpr size_t kParts = kBits == 1 ? kSumLanes / kLanes : 4;

  template <class W>
  static HWY_INLINE W Fold(W a, W b) {
    if constexpr (kBits == 1) {
      return hn::Add(a, b);
    } else {
      return hn::Max(a, b);
    }
  }

  hn::Vec<D> part_[kParts];
};

HWY_INLINE void StoreScale(V scale, uint8_t* at) {
  const uint16_t half = static_cast<uint16_t>(BitsOf(hn::GetLane(scale)) >> 16);
  memcpy(at, &half, sizeof(half));
}

// The loss of an encoding: codes * scale is exact, so a fused subtraction gives the same bits.
HWY_INLINE V LossOf(V x, V codes, V scale) { return hn::NegMulAdd(codes, scale, x); }

// The head of a block whose vector j is x(j), for a multiple of eight vectors.
template <int kBits, class X>
HWY_INLINE BlockScale HeadOf(size_t vectors, size_t count, X x) {
  Head<kBits> head;
  for (size_t j = 0; j < vectors; j += 8) {
#pragma GCC unroll 8
    for (size_t t = 0; t < 8; ++t) head.Add(t, x(j + t));
  }
  return head.Finish(count);
}

// A Rounding converts scaled elements to codes. Prepare(b) is called any time before the codes of
// block b are computed, but after those of block b - 2; ForBlock(b) returns the object that rounds
// the block, whose Of(j, scaled) returns the codes of vector j. simd_options-inl.h has others.

struct Codes {
  hn::Vec<I> whole;
  V value;  // the same numbers
};

class ToNearest {
 public:
  HWY_INLINE void Prepare(size_t) {}
  HWY_INLINE ToNearest ForBlock(size_t) const { return *this; }
  HWY_INLINE Codes Of(size_t, V scaled) const {
    const auto whole = RoundToInt(scaled);
    return {whole, hn::ConvertTo(F(), whole)};
  }
};

// Second pass: quantises x(j), packs the codes, and calls sink(j, x, codes) for each vector; the
// decoded values are codes * scale.
template <int kBits, class Rounding, class X, class Sink>
HWY_INLINE void QuantiseBlock(size_t vectors, const BlockScale& s, Rounding rounding, X x,
                              uint8_t* codes, Sink sink) {
  if constexpr (kBits == 1) {
    for (size_t j = 0; j < vectors; ++j) {
      const V value = x(j);
      StoreSigns(value, codes, j);
      sink(j, value, hn::CopySignToAbs(hn::Set(F(), 1.0f), value));
    }
    return;
  }
  constexpr size_t kStep = kGroup<kBits>;
  for (size_t j = 0; j < vectors; j += kStep) {
    Packer<kBits> packer;
#pragma GCC unroll 8
    for (size_t t = 0; t < kStep; ++t) {
      const V value = x(j + t);
      const Codes code = rounding.Of(j + t, hn::Mul(value, s.inverse));
      packer.Add(t, code.whole);
      sink(j + t, value, code.value);
    }
    packer.Store(codes + kLanes * kBits / 8 * j);
  }
}

// A tiny block has scale 0, and all of it is loss. A block that is not finite has scale NaN and an
// unchanged residual. Codes are 0 in both. Calls sink(j, x, kind) for every vector.
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
      vectors, magnitude, [&](size_t j) HWY_ATTR { return LoadX<kFeedback>(g, r, kLanes * j); },
      scale, codes,
      [&](size_t j, V x, BlockKind kind) HWY_ATTR {
        if (kFeedback && kind == BlockKind::kTiny) hn::StoreU(x, F(), r + kLanes * j);
      });
}

// A default block with feedback, rounded to nearest, read once and kept in registers.
template <int kBits>
HWY_INLINE void EncodeInRegisters(const float* HWY_RESTRICT g, float* HWY_RESTRICT r,
                                  uint8_t* HWY_RESTRICT scale, uint8_t* HWY_RESTRICT codes) {
  PrefetchBlock(g, kDefaultBlock * sizeof(float));
  PrefetchBlock(r, kDefaultBlock * sizeof(float));
  V x[kVectors];
  Head<kBits> head;
#pragma GCC unroll 64
  for (size_t j = 0; j < kVectors; ++j) {
    x[j] = LoadX<true>(g, r, kLanes * j);
    head.Add(j, x[j]);
  }
  const BlockScale s = head.Finish(kDefaultBlock);
  if (HWY_UNLIKELY(IsSpecial(s.magnitude()))) {
    return EncodeSpecial<kBits, true>(kVectors, s.magnitude(), g, r, scale, codes);
  }
  StoreScale(s.scale, scale);
  if constexpr (kBits == 1) {
#pragma GCC unroll 64
    for (size_t j = 0; j < kVectors; ++j) {
      StoreSigns(x[j], codes, j);
      hn::StoreU(hn::Sub(x[j], hn::CopySignToAbs(s.scale, x[j])), F(), r + kLanes * j);
    }
    return;
  }
  constexpr size_t kStep = kGroup<kBits>;
#pragma GCC unroll 64
  for (size_t j = 0; j < kVectors; j += kStep) {
    Packer<kBits> packer;
#pragma GCC unroll 8
    for (size_t t = 0; t < kStep; ++t) {
      const Codes code = ToNearest().Of(j + t, hn::Mul(x[j + t], s.inverse));
      packer.Add(t, code.whole);
      hn::StoreU(LossOf(x[j + t], code.value, s.scale), F(), r + kLanes * (j + t));
    }
    packer.Store(codes + kLanes * kBits / 8 * j);
  }
}

// The next block: the data that is needed before it can be packed.
template <int kBits, bool kFeedback>
class AheadBlock {
 public:
  HWY_INLINE BlockScale Read(const float* HWY_RESTRICT g, const float* HWY_RESTRICT r,
                             size_t vectors, size_t filled) {
    return HeadOf<kBits>(vectors, filled, [&](size_t j) HWY_ATTR {
      const V x = LoadX<kFeedback>(g, r, kLanes * j);
      if constexpr (kFeedback) hn::Store(x, F(), x_ + kLanes * j);
      return x;
    });
  }

  // Vector j of x. Sums come from the first-level cache, since that is one load instead of two and
  // an addition.
  HWY_INLINE V X(const float* HWY_RESTRICT g, size_t j) const {
    if constexpr (kFeedback) return hn::Load(F(), x_ + kLanes * j);
    return hn::LoadU(F(), g + kLanes * j);
  }

 private:
  alignas(64) float x_[kFeedback ? kMaxBlock : kLanes];
};

// Looks one block ahead: the maximum and the divisions of block b + 1 overlap the packing of block
// b. kBlock: the block's elements as a compile-time constant; 0: blocks.block.
template <int kBits, bool kFeedback, size_t kBlock, class Rounding>
HWY_INLINE void EncodeAhead(const Blocks& blocks, Rounding& rounding, const float* HWY_RESTRICT g,
                            float* HWY_RESTRICT r, uint8_t* HWY_RESTRICT scales,
                            uint8_t* HWY_RESTRICT codes) {
  const size_t block = kBlock > 0 ? kBlock : blocks.block, vectors = block / kLanes;
  AheadBlock<kBits, kFeedback> ahead[2];
  BlockScale next = ahead[0].Read(g, r, vectors, blocks.filled);
  rounding.Prepare(0);
  for (size_t b = 0; b < blocks.count; ++b, g += block, r += kFeedback ? block : 0) {
    const BlockScale s = next;
    PrefetchBlock(g, block * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r, block * sizeof(float));
    if (b + 1 < blocks.count) {
      next =
          ahead[(b + 1) % 2].Read(g + block, r + (kFeedback ? block : 0), vectors, blocks.filled);
      rounding.Prepare(b + 1);
    }
    uint8_t* scale = scales + 2 * b;
    uint8_t* to = codes + block * kBits / 8 * b;
    if (HWY_UNLIKELY(IsSpecial(s.magnitude()))) {
      EncodeSpecial<kBits, kFeedback>(vectors, s.magnitude(), g, r, scale, to);
      continue;
    }
    StoreScale(s.scale, scale);
    QuantiseBlock<kBits>(
        vectors, s, rounding.ForBlock(b), [&](size_t j) HWY_ATTR { return ahead[b % 2].X(g, j); },
        to,
        [&](size_t j, V x, V code) HWY_ATTR {
          if constexpr (kFeedback) hn::StoreU(LossOf(x, code, s.scale), F(), r + kLanes * j);
        });
  }
}

// Blocks without feedback are read twice: that costs one load, and hides the divisions.
template <int kBits, bool kFeedback, class Rounding>
HWY_INLINE void EncodeLoop(const Blocks& blocks, Rounding&& rounding, const float* g, float* r,
                           uint8_t* scales, uint8_t* codes) {
  if (blocks.count == 0) return;
  if (blocks.block != kDefaultBlock || blocks.filled != kDefaultBlock) {
    return EncodeAhead<kBits, kFeedback, 0>(blocks, rounding, g, r, scales, codes);
  }
  // Looking ahead makes int4 faster, and int8 and onebit slower: decision 9.
  constexpr bool kNearest = std::is_same_v<std::decay_t<Rounding>, ToNearest>;
  if constexpr (kInRegisters && kFeedback && kNearest && kBits != 4) {
    for (size_t b = 0; b < blocks.count; ++b) {
      EncodeInRegisters<kBits>(g + kDefaultBlock * b, r + kDefaultBlock * b, scales + 2 * b,
                               codes + kDefaultBlock * kBits / 8 * b);
    }
  } else {
    EncodeAhead<kBits, kFeedback, kDefaultBlock>(blocks, rounding, g, r, scales, codes);
  }
}

HWY_INLINE float LoadScale(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, sizeof(half));
  return FloatOf(static_cast<uint32_t>(half) << 16);
}

// Where a decoded vector goes. kPast bypasses the caches: `out` must be aligned to vectors.
enum class To { kOut, kSum, kPast };

// Stores that bypass the caches read no line before they overwrite it, which saves almost half of
// the traffic; but data that the caches could have held is later read from memory.
inline constexpr size_t kPastCachesBytes = size_t{32} << 20;

HWY_INLINE bool GoesPastCaches(size_t numel, const float* out) {
  return numel * sizeof(float) >= kPastCachesBytes &&
         reinterpret_cast<uintptr_t>(out) % sizeof(V) == 0;
}

template <int kBits, To kTo>
HWY_INLINE void DecodeLoop(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                           const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  constexpr size_t kStep = Unpacker<kBits>::kStep;
  const size_t block = blocks.block, count = blocks.count;  // copies: `out` might alias them
  for (size_t b = 0; b < count; ++b) {
    const Unpacker<kBits> unpack(LoadScale(scales + 2 * b));
    for (size_t i = 0; i < block; i += kStep * kLanes) {
#pragma GCC unroll 8
      for (size_t t = 0; t < kStep; ++t) {
        V value = unpack.Values(codes, t);
        if constexpr (kTo == To::kSum) value = hn::Add(hn::LoadU(F(), out + kLanes * t), value);
        if constexpr (kTo == To::kPast) {
          hn::Stream(value, F(), out + kLanes * t);
        } else {
          hn::StoreU(value, F(), out + kLanes * t);
        }
      }
      codes += kStep * kLanes * kBits / 8;
      out += kStep * kLanes;
    }
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_QUANTISE_INL_H_
