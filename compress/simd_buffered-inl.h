// The blocks that take a detour through a buffer: stochastic rounding and the Hadamard transform.
// Included once for each target.
#if defined(THINWIRE_COMPRESS_SIMD_BUFFERED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_BUFFERED_INL_H_
#undef THINWIRE_COMPRESS_SIMD_BUFFERED_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_BUFFERED_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/hadamard.h"
#include "compress/philox.h"
#include "compress/simd_decode-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using VU = hn::Vec<U>;

// Philox's words of the even lanes' counters, or of the odd ones': each in the lower half of 64
// bits, where a multiplication takes it from and leaves its lower product. Upper halves hold
// anything.
using Du64 = hn::RepartitionToWide<U>;
struct HalfCounters {
  HalfCounters() {}  // NEON's compiler gives an implicit one no instruction set
  hn::Vec<Du64> word[4];
};

HWY_INLINE void PhiloxRound(HalfCounters& c, uint32_t k0, uint32_t k1) {
  const Du64 wide;
  const auto product = [wide](hn::Vec<Du64> word, uint32_t factor) HWY_ATTR {
    return hn::BitCast(wide, hn::MulEven(hn::BitCast(U(), word), hn::Set(U(), factor)));
  };
  const auto p0 = product(c.word[0], kPhiloxMul[0]), p1 = product(c.word[2], kPhiloxMul[1]);
  const auto key0 = hn::BitCast(wide, hn::Set(U(), k0)), key1 = hn::BitCast(wide, hn::Set(U(), k1));
  c.word[0] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), key0), c.word[1]);
  c.word[1] = p1;
  c.word[2] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), key1), c.word[3]);
  c.word[3] = p0;
}

// Philox of philox.h, lane by lane.
HWY_INLINE void PhiloxLanes(VU* c, uint64_t key) {
  const Du64 wide;
  HalfCounters even, odd;
  for (size_t i = 0; i < 4; ++i) {
    even.word[i] = hn::BitCast(wide, c[i]);
    odd.word[i] = hn::ShiftRight<32>(even.word[i]);
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    PhiloxRound(even, k0, k1);
    PhiloxRound(odd, k0, k1);
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  for (size_t i = 0; i < 4; ++i) {
    c[i] = hn::OddEven(hn::BitCast(U(), hn::ShiftLeft<32>(odd.word[i])),
                       hn::BitCast(U(), even.word[i]));
  }
}

// UniformOf of the draw in bits 7 to 22: as a fraction of a number from 1 on it is exact.
HWY_INLINE V Uniform(VU shifted) {
  const VU draw = hn::And(shifted, hn::Set(U(), 0xffffu << 7));
  const VU number = hn::Or(draw, hn::Set(U(), 127u << 23 | 1u << 6));
  return hn::Sub(hn::BitCast(F(), number), hn::Set(F(), 1.0f));
}

// The uniform numbers of the kDrawGroup elements from `first` on, a multiple of kDrawGroup.
HWY_INLINE void UniformsOf(const Draws& draws, uint64_t first, float* HWY_RESTRICT out) {
  const uint64_t counter = first / kDrawGroup * kDrawLanes;
  for (size_t lane = 0; lane < kDrawLanes; lane += kLanes) {
    // Sixteen counters share their upper word: the first one is a multiple of sixteen.
    VU c[4] = {hn::Iota(U(), static_cast<uint32_t>(counter) + static_cast<uint32_t>(lane)),
               hn::Set(U(), static_cast<uint32_t>(counter >> 32)),
               hn::Set(U(), static_cast<uint32_t>(draws.stream)),
               hn::Set(U(), static_cast<uint32_t>(draws.stream >> 32))};
    PhiloxLanes(c, draws.key);
#pragma GCC unroll 4
    for (size_t word = 0; word < 4; ++word) {
      const VU w = c[word];
      const VU windows[4] = {hn::ShiftLeft<7>(w), hn::ShiftRight<1>(w), hn::ShiftRight<9>(w),
                             hn::Or(hn::ShiftRight<17>(w), hn::ShiftLeft<15>(w))};
      for (size_t t = 0; t < 4; ++t) {
        hn::Store(Uniform(windows[t]), F(), out + kDrawLanes * (4 * word + t) + lane);
      }
    }
  }
}

// One butterfly of a stride below the vector's length: the partner, plus or minus the own value.
template <size_t kStride>
HWY_INLINE V ButterflyWithin(V v) {
  alignas(64) uint32_t minus[kLanes];
  for (size_t i = 0; i < kLanes; ++i) minus[i] = i & kStride ? ~kAbsMask : 0;
  const V own = hn::Xor(v, hn::BitCast(F(), hn::Load(U(), minus)));
  if constexpr (kStride == 1) return hn::Add(hn::Shuffle2301(v), own);
  if constexpr (kStride == 2) return hn::Add(hn::Shuffle1032(v), own);
  if constexpr (kStride == 4) return hn::Add(hn::SwapAdjacentBlocks(v), own);
  if constexpr (kStride == 8) return hn::Add(hn::ConcatLowerUpper(F(), v, v), own);
}

// Butterflies of hadamard.h on 256 aligned floats.
HWY_INLINE void ButterfliesOf(float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    V v = ButterflyWithin<2>(ButterflyWithin<1>(hn::Load(F(), x + i)));
    if constexpr (kLanes >= 8) v = ButterflyWithin<4>(v);
    if constexpr (kLanes >= 16) v = ButterflyWithin<8>(v);
    hn::Store(v, F(), x + i);
  }
  for (size_t stride = kLanes; stride < kTransform; stride *= 2) {
    for (size_t begin = 0; begin < kTransform; begin += 2 * stride) {
      for (size_t i = begin; i < begin + stride; i += kLanes) {
        const V a = hn::Load(F(), x + i), b = hn::Load(F(), x + i + stride);
        hn::Store(hn::Add(a, b), F(), x + i);
        hn::Store(hn::Sub(a, b), F(), x + i + stride);
      }
    }
  }
}

HWY_INLINE void MultiplyBy(const float* HWY_RESTRICT factors, float* HWY_RESTRICT x) {
  for (size_t i = 0; i < kTransform; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(F(), x + i), hn::Load(F(), factors + i)), F(), x + i);
  }
}

// Quantises the block in `x`, and hands each vector's codes to sink(j, x, codes), which stand for
// codes * scale.
template <int kBits, class Sink>
HWY_INLINE void QuantiseBuffer(size_t vectors, const BlockScale& s, const float* uniforms,
                               const float* x, uint8_t* codes, Sink sink) {
  const V top = hn::Set(F(), kBits == 8 ? 127.0f : 7.0f), bottom = hn::Neg(top);
  constexpr size_t kStep = kGroup<kBits>;
  for (size_t j = 0; j < vectors; j += kStep) {
    hn::Vec<I> k[kStep];
#pragma GCC unroll 8
    for (size_t t = 0; t < kStep; ++t) {
      const V value = hn::Load(F(), x + kLanes * (j + t));
      V scaled = hn::Mul(value, s.inverse);
      if (uniforms != nullptr) {
        scaled = hn::Floor(hn::Add(scaled, hn::Load(F(), uniforms + kLanes * (j + t))));
      }
      scaled = hn::Min(hn::Max(scaled, bottom), top);
      k[t] = RoundToInt(scaled);
      sink(j + t, value, hn::ConvertTo(F(), k[t]));
    }
    PackGroup<kBits>(k, codes + kLanes * kBits / 8 * j);
  }
}

template <int kBits, bool kFeedback>
HWY_INLINE void EncodeBuffered(const Blocks& blocks, const float* HWY_RESTRICT g,
                               float* HWY_RESTRICT r, uint8_t* HWY_RESTRICT scales,
                               uint8_t* HWY_RESTRICT codes) {
  const size_t block = blocks.block, vectors = block / kLanes;
  alignas(64) float buffer[4096];
  alignas(64) float uniforms[4096];
  for (size_t b = 0; b < blocks.count; ++b, g += block, r += kFeedback ? block : 0) {
    uint8_t* scale = scales + 2 * b;
    uint8_t* to = codes + block * kBits / 8 * b;
    PrefetchBlock(g, block * sizeof(float));
    if constexpr (kFeedback) PrefetchBlock(r, block * sizeof(float));
    for (size_t j = 0; j < block; j += kLanes) {
      hn::Store(LoadX<kFeedback>(g, r, j), F(), buffer + j);
    }
    if (blocks.signs != nullptr) {
      MultiplyBy(blocks.signs, buffer);
      ButterfliesOf(buffer);
    }
    BlockScale s = HeadOf<kBits>(vectors, blocks.filled, [&](size_t j) HWY_ATTR {
      return hn::Load(F(), buffer + kLanes * j);
    });
    if (blocks.signs != nullptr) s.magnitude = TransformedMagnitude(s.magnitude);
    if (HWY_UNLIKELY(IsSpecial(s.magnitude))) {
      EncodeSpecial<kBits, kFeedback>(vectors, s.magnitude, g, r, scale, to);
      continue;
    }
    if (blocks.signs != nullptr) {
      const float clipped = kClip * FloatOf(s.magnitude);
      s = ScaleFor<kBits>(hn::BitCast(I(), hn::Set(F(), clipped)));
    }
    StoreScale(s.scale, scale);
    const float* drawn = nullptr;
    if (blocks.draws != nullptr) {
      // A block begins a group of draws, or is the second half of one.
      const uint64_t first = blocks.draws->first + block * b, skip = first % kDrawGroup;
      for (size_t i = 0; i < skip + block; i += kDrawGroup) {
        UniformsOf(*blocks.draws, first - skip + i, uniforms + i);
      }
      drawn = uniforms + skip;
    }
    if (blocks.signs == nullptr) {
      QuantiseBuffer<kBits>(vectors, s, drawn, buffer, to, [&](size_t j, V x, V code) HWY_ATTR {
        if constexpr (kFeedback) hn::StoreU(LossOf(x, code, s.scale), F(), r + kLanes * j);
      });
      continue;
    }
    QuantiseBuffer<kBits>(vectors, s, drawn, buffer, to, [&](size_t j, V, V code) HWY_ATTR {
      hn::Store(hn::Mul(code, s.scale), F(), buffer + kLanes * j);
    });
    if constexpr (!kFeedback) continue;
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < block; j += kLanes) {
      const V x = LoadX<true>(g, r, j);
      hn::StoreU(hn::Sub(x, hn::Load(F(), buffer + j)), F(), r + j);
    }
  }
}

// Undoes the transform of decoded blocks of 256.
template <To kTo>
HWY_INLINE void DecodeTransformed(const Blocks& blocks, const uint8_t* HWY_RESTRICT scales,
                                  const uint8_t* HWY_RESTRICT codes, float* HWY_RESTRICT out) {
  alignas(64) float buffer[kTransform];
  for (size_t b = 0; b < blocks.count; ++b, out += kTransform, codes += kTransform / 2) {
    const Blocks one{.bits = 4, .block = kTransform, .count = 1, .filled = kTransform};
    if (HWY_UNLIKELY(!IsTransformed(LoadScale(scales + 2 * b)))) {
      DecodeLoop<4, kTo>(one, scales + 2 * b, codes, out);
      continue;
    }
    DecodeLoop<4, To::kOut>(one, scales + 2 * b, codes, buffer);
    ButterfliesOf(buffer);
    MultiplyBy(blocks.signs, buffer);
    for (size_t j = 0; j < kTransform; j += kLanes) {
      V value = hn::Load(F(), buffer + j);
      if constexpr (kTo == To::kSum) value = hn::Add(hn::LoadU(F(), out + j), value);
      hn::StoreU(value, F(), out + j);
    }
  }
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_BUFFERED_INL_H_
