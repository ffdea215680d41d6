// The owner's reduction of all ranks' shards in one pass: sum in rank order, mean, feedback,
// encode, decode. Sums stay in registers, and a block in the first-level cache. Included once per
// target.
#if defined(THINWIRE_COMPRESS_SIMD_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_COMPRESS_SIMD_REDUCE_INL_H_
#undef THINWIRE_COMPRESS_SIMD_REDUCE_INL_H_
#else
#define THINWIRE_COMPRESS_SIMD_REDUCE_INL_H_
#endif

#include <hwy/highway.h>

#include "compress/element_math.h"
#include "compress/simd_kernels.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors that are summed together, so that a rank's pointers and scale are looked up once for all:
// as many as Unpacker unpacks together.
inline constexpr size_t kSumStep = Unpacker<8>::kStep;

// Bytes of their codes.
template <int kUp>
inline constexpr size_t kSumCodes = kSumStep* kLanes* kUp / 8;

// The sum of all ranks' vectors t = 0 .. kStep - 1, in rank order. own(t) is the owner's vector t;
// loader(wire) returns a function of t for another rank's.
template <size_t kStep, class Own, class Loader>
HWY_INLINE void SumRanks(std::span<const uint8_t* const> wires, Own own, Loader loader,
                         V (&sum)[kStep]) {
  for (size_t rank = 0; rank < wires.size(); ++rank) {
    const auto take = [&](auto load) HWY_ATTR {
      if (rank == 0) {
#pragma GCC unroll 8
        for (size_t t = 0; t < kStep; ++t) sum[t] = load(t);
      } else {
#pragma GCC unroll 8
        for (size_t t = 0; t < kStep; ++t) sum[t] = hn::Add(sum[t], load(t));
      }
    };
    wires[rank] == nullptr ? take(own) : take(loader(wires[rank]));
  }
}

// The sums of a block's vectors, kSumStep at a time, for any number of ranks.
template <int kUp>
class SumOfMany {
 public:
  HWY_INLINE SumOfMany(const Blocks& blocks, const Reduction& args, size_t b)
      : wires_(args.wires),
        own_(args.own + blocks.block * b),
        scale_at_(args.scales_at + 2 * b),
        codes_at_(args.codes_at + blocks.block * kUp / 8 * b) {}

  HWY_INLINE void Next(V (&x)[kSumStep]) {
    SumRanks(
        wires_, [&](size_t t) HWY_ATTR { return hn::LoadU(F(), own_ + kLanes * t); },
        [&](const uint8_t* wire) HWY_ATTR {
          return [unpack = Unpacker<kUp>(LoadScale(wire + scale_at_)),
                  codes = wire + codes_at_](size_t t) HWY_ATTR { return unpack.Values(codes, t); };
        },
        x);
    own_ += kSumStep * kLanes;
    codes_at_ += kSumCodes<kUp>;
  }

 private:
  const std::span<const uint8_t* const> wires_;
  const float* own_;
  const size_t scale_at_;
  size_t codes_at_;
};

// The same for two ranks of which one is the owner: their sum does not depend on the order, and
// nothing is looked up within a block.
template <int kUp>
class SumOfTwo {
 public:
  HWY_INLINE SumOfTwo(const Blocks& blocks, const Reduction& args, size_t b)
      : own_(args.own + blocks.block * b),
        codes_(Peer(args) + args.codes_at + blocks.block * kUp / 8 * b),
        unpack_(LoadScale(Peer(args) + args.scales_at + 2 * b)) {}

  HWY_INLINE void Next(V (&x)[kSumStep]) {
#pragma GCC unroll 8
    for (size_t t = 0; t < kSumStep; ++t) {
      x[t] = hn::Add(hn::LoadU(F(), own_ + kLanes * t), unpack_.Values(codes_, t));
    }
    own_ += kSumStep * kLanes;
    codes_ += kSumCodes<kUp>;
  }

 private:
  static const uint8_t* Peer(const Reduction& args) {
    return args.wires[args.wires[0] == nullptr ? 1 : 0];
  }

  const float* own_;
  const uint8_t* codes_;
  const Unpacker<kUp> unpack_;
};

// A reduced block that is special: out is 0 or NaN.
template <int kDown, bool kFeedback>
HWY_NOINLINE void ReduceSpecial(const float* buffer, size_t vectors, uint32_t magnitude, float* r,
                                float* out, uint8_t* scale, uint8_t* codes) {
  const V value = hn::Set(
      F(), KindOf(magnitude) == BlockKind::kTiny ? 0.0f : FloatOf(uint32_t{kNanScale} << 16));
  SpecialBlock<kDown>(
      vectors, magnitude, [&](size_t j) HWY_ATTR { return hn::Load(F(), buffer + kLanes * j); },
      scale, codes,
      [&](size_t j, V x, BlockKind kind) HWY_ATTR {
        hn::StoreU(value, F(), out + kLanes * j);
        if (kFeedback && kind == BlockKind::kTiny) hn::StoreU(x, F(), r + kLanes * j);
      });
}

// x goes through a buffer in the first-level cache: its maximum must be known before it is
// quantised.
template <template <int> class Sum, int kUp, int kDown, bool kFeedback>
HWY_INLINE void ReduceLoop(const Blocks& blocks, const Reduction& args) {
  const size_t block = blocks.block, vectors = block / kLanes;
  const V mean = hn::Set(F(), args.scale);
  alignas(64) float buffer[4096];
  for (size_t b = 0; b < blocks.count; ++b) {
    float* HWY_RESTRICT r = kFeedback ? args.r + block * b : nullptr;
    float* HWY_RESTRICT out = args.out + block * b;
    uint8_t* HWY_RESTRICT codes = args.codes + block * kDown / 8 * b;
    Sum<kUp> sum(blocks, args, b);
    Head<kDown> head;
    for (size_t j = 0; j < vectors; j += kSumStep) {
      V x[kSumStep];
      sum.Next(x);
#pragma GCC unroll 8
      for (size_t t = 0; t < kSumStep; ++t) {
        x[t] = hn::Mul(x[t], mean);
        if constexpr (kFeedback) x[t] = hn::Add(x[t], hn::LoadU(F(), r + kLanes * (j + t)));
        hn::Store(x[t], F(), buffer + kLanes * (j + t));
        head.Add(t, x[t]);
      }
    }
    const BlockScale s = head.Finish(block);
    if (HWY_UNLIKELY(IsSpecial(s.magnitude()))) {
      ReduceSpecial<kDown, kFeedback>(buffer, vectors, s.magnitude(), r, out, args.scales + 2 * b,
                                      codes);
      continue;
    }
    StoreScale(s.scale, args.scales + 2 * b);
    QuantiseBlock<kDown>(
        vectors, s, ToNearest(),
        [&](size_t j) HWY_ATTR { return hn::Load(F(), buffer + kLanes * j); }, codes,
        [&](size_t j, V x, V code) HWY_ATTR {
          const V decoded = hn::Mul(code, s.scale);
          hn::StoreU(decoded, F(), out + kLanes * j);
          if constexpr (kFeedback) hn::StoreU(hn::Sub(x, decoded), F(), r + kLanes * j);
        });
  }
}

// Codecs without blocks: does whole vectors, and returns the elements done. store(i, x) takes the
// mean of the vector at element i.
template <class Loader, class Store>
HWY_INLINE size_t ReduceVectors(const Reduction& args, size_t n, Loader load, Store store) {
  const V mean = hn::Set(F(), args.scale);
  const auto reduce = [&](size_t i, auto& x) HWY_ATTR {
    SumRanks(
        args.wires, [&](size_t t) HWY_ATTR { return hn::LoadU(F(), args.own + i + kLanes * t); },
        [&](const uint8_t* wire) HWY_ATTR {
          return [load, at = wire + args.codes_at, i](size_t t)
                     HWY_ATTR { return load(at, i + kLanes * t); };
        },
        x);
    size_t at = i;
    for (const V& sum : x) {
      store(at, hn::Mul(sum, mean));
      at += kLanes;
    }
  };
  size_t i = 0;
  for (; i + kSumStep * kLanes <= n; i += kSumStep * kLanes) {
    V x[kSumStep];
    reduce(i, x);
  }
  for (; i + kLanes <= n; i += kLanes) {
    V x[1];
    reduce(i, x);
  }
  return i;
}

template <bool kFeedback>
HWY_INLINE size_t ReduceBf16Of(const Reduction& args, size_t n) {
  return ReduceVectors(
      args, n, [](const uint8_t* codes, size_t i) HWY_ATTR { return LoadBf16(codes + 2 * i); },
      [&](size_t i, V x) HWY_ATTR {
        const V old = kFeedback ? hn::LoadU(F(), args.r + i) : hn::Zero(F());
        if constexpr (kFeedback) x = hn::Add(x, old);
        const V decoded = StoreBf16(x, args.codes + 2 * i);
        if constexpr (kFeedback) hn::StoreU(Bf16Loss(x, decoded, old), F(), args.r + i);
        hn::StoreU(decoded, F(), args.out + i);
      });
}

HWY_INLINE size_t ReduceFp32Of(const Reduction& args, size_t n) {
  return ReduceVectors(
      args, n,
      [](const uint8_t* codes, size_t i)
          HWY_ATTR { return hn::LoadU(F(), reinterpret_cast<const float*>(codes) + i); },
      [&](size_t i, V x) HWY_ATTR { hn::StoreU(x, F(), args.out + i); });
}

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // THINWIRE_COMPRESS_SIMD_REDUCE_INL_H_
