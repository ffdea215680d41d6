// Compiled once per instruction set. The bytes must equal those of scalar_backend.cc.
#include "compress/simd_kernels.h"

#include "compress/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/simd_kernels.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "compress/backend.h"
#include "compress/element_math.h"

// All are compiled per target, each with its own include guard.
#include "compress/simd_options-inl.h"
#include "compress/simd_pack-inl.h"
#include "compress/simd_quantise-inl.h"
#include "compress/simd_reduce-inl.h"
#include "compress/simd_topk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <int kBits, bool kFeedback>
void EncodeQuantised(const Blocks& blocks, const float* g, float* r, uint8_t* scales,
                     uint8_t* codes) {
  const auto encode = [&](auto&& rounding) HWY_ATTR {
    if constexpr (kBits == 4) {
      if (blocks.signs != nullptr) {
        return EncodeTransformed<kFeedback>(blocks, rounding, g, r, scales, codes);
      }
    }
    EncodeLoop<kBits, kFeedback>(blocks, rounding, g, r, scales, codes);
  };
  if (blocks.draws == nullptr) return encode(ToNearest());
  encode(Stochastic<kBits>(*blocks.draws, blocks.block));
}

template <bool kFeedback>
void EncodeBlocksOf(const Blocks& blocks, const float* g, float* r, uint8_t* scales,
                    uint8_t* codes) {
  switch (blocks.bits) {
    case 8: return EncodeQuantised<8, kFeedback>(blocks, g, r, scales, codes);
    case 4: return EncodeQuantised<4, kFeedback>(blocks, g, r, scales, codes);
    default: return EncodeLoop<1, kFeedback>(blocks, ToNearest(), g, r, scales, codes);
  }
}

void EncodeBlocksT(const Blocks& blocks, const float* g, float* r, uint8_t* scales,
                   uint8_t* codes) {
  r != nullptr ? EncodeBlocksOf<true>(blocks, g, r, scales, codes)
               : EncodeBlocksOf<false>(blocks, g, r, scales, codes);
}

template <To kTo>
void DecodeBlocksOf(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out) {
  switch (blocks.bits) {
    case 8: return DecodeLoop<8, kTo>(blocks, scales, codes, out);
    case 4: return DecodeLoop<4, kTo>(blocks, scales, codes, out);
    default: return DecodeLoop<1, kTo>(blocks, scales, codes, out);
  }
}

void DecodeBlocksT(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out) {
  if (blocks.signs != nullptr) return DecodeTransformed<To::kOut>(blocks, scales, codes, out);
  if (!GoesPastCaches(blocks.count * blocks.block, out))
    return DecodeBlocksOf<To::kOut>(blocks, scales, codes, out);
  DecodeBlocksOf<To::kPast>(blocks, scales, codes, out);
  hwy::FlushStream();
}

void DecodeAddBlocksT(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes,
                      float* sum) {
  if (blocks.signs != nullptr) return DecodeTransformed<To::kSum>(blocks, scales, codes, sum);
  DecodeBlocksOf<To::kSum>(blocks, scales, codes, sum);
}

template <template <int> class Sum, bool kFeedback>
void ReduceBlocksOf(const Blocks& blocks, int down_bits, const Reduction& args) {
  if (blocks.bits == 1 && down_bits == 4) return ReduceLoop<Sum, 1, 4, kFeedback>(blocks, args);
  switch (blocks.bits) {
    case 8: return ReduceLoop<Sum, 8, 8, kFeedback>(blocks, args);
    case 4: return ReduceLoop<Sum, 4, 4, kFeedback>(blocks, args);
    default: return ReduceLoop<Sum, 1, 1, kFeedback>(blocks, args);
  }
}

void ReduceBlocksT(const Blocks& blocks, int down_bits, const Reduction& args) {
  // A reducer without a shard has two wires and takes the loop for many.
  const bool own_and_peer =
      args.wires.size() == 2 && (args.wires[0] == nullptr || args.wires[1] == nullptr);
  if (own_and_peer) {
    args.r != nullptr ? ReduceBlocksOf<SumOfTwo, true>(blocks, down_bits, args)
                      : ReduceBlocksOf<SumOfTwo, false>(blocks, down_bits, args);
  } else {
    args.r != nullptr ? ReduceBlocksOf<SumOfMany, true>(blocks, down_bits, args)
                      : ReduceBlocksOf<SumOfMany, false>(blocks, down_bits, args);
  }
}

size_t ReduceBf16T(const Reduction& args, size_t n) {
  return args.r != nullptr ? ReduceBf16Of<true>(args, n) : ReduceBf16Of<false>(args, n);
}

size_t ReduceFp32T(const Reduction& args, size_t n) { return ReduceFp32Of(args, n); }

// Calls body(i, count) for whole vectors, then for the rest, which uses the scalar math.
template <class Vectors, class Rest>
HWY_INLINE void ForEach(size_t n, Vectors vectors, Rest rest) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) vectors(i);
  for (; i < n; ++i) rest(i);
}

// Access to single elements at any alignment.
float Peek(const float* at, size_t i) {
  float value;
  memcpy(&value, reinterpret_cast<const uint8_t*>(at) + i * sizeof(value), sizeof(value));
  return value;
}
void Poke(float* at, size_t i, float value) {
  memcpy(reinterpret_cast<uint8_t*>(at) + i * sizeof(value), &value, sizeof(value));
}
uint16_t Half(const uint8_t* at, size_t i) {
  uint16_t half;
  memcpy(&half, at + 2 * i, sizeof(half));
  return half;
}
void PutHalf(uint8_t* at, size_t i, uint16_t half) { memcpy(at + 2 * i, &half, sizeof(half)); }

void EncodeBf16T(const float* g, float* r, uint8_t* wire, size_t n) {
  const F d;
  ForEach(
      n,
      [&](size_t i) HWY_ATTR {
        const V old = r == nullptr ? hn::Zero(d) : hn::LoadU(d, r + i);
        const V x = r == nullptr ? hn::LoadU(d, g + i) : hn::Add(hn::LoadU(d, g + i), old);
        const V decoded = StoreBf16(x, wire + 2 * i);
        if (r != nullptr) hn::StoreU(Bf16Loss(x, decoded, old), d, r + i);
      },
      [&](size_t i) {
        const float x = r == nullptr ? Peek(g, i) : Peek(g, i) + Peek(r, i);
        const uint16_t half = thinwire::ToBf16(x);
        PutHalf(wire, i, half);
        const float kept = x - thinwire::FromBf16(half);
        if (r != nullptr && IsFinite(kept)) Poke(r, i, kept);
      });
}

template <bool kFeedback>
void EncodeTernaryOf(const float* g, float* r, float threshold, uint8_t* codes, size_t n) {
  const F d;
  const V plus = hn::Set(d, threshold), minus = hn::Set(d, -threshold);
  const auto infinity = hn::Set(I(), static_cast<int32_t>(kInfBits));
  const hn::Rebind<uint8_t, F> d8;
  for (size_t i = 0; i < n; i += 4 * kLanes, codes += kLanes) {
    hn::Vec<I> code[4];
#pragma GCC unroll 4
    for (size_t t = 0; t < 4; ++t) {
      const size_t at = i + kLanes * t;
      const V x = LoadX<kFeedback>(g, r, at);
      const auto is_finite = hn::RebindMask(d, hn::Lt(Magnitude(x), infinity));
      const auto is_plus = hn::And(is_finite, hn::Ge(x, plus));
      const auto is_minus = hn::And(is_finite, hn::Le(x, minus));
      const auto low = hn::RebindMask(I(), hn::Or(is_plus, is_minus));
      const auto high = hn::RebindMask(I(), hn::Or(is_minus, hn::Not(is_finite)));
      code[t] = hn::Or(hn::IfThenElseZero(low, hn::Set(I(), 1)),
                       hn::IfThenElseZero(high, hn::Set(I(), 2)));
      if constexpr (kFeedback) {
        const V sent = hn::IfThenElse(is_plus, plus, hn::IfThenElseZero(is_minus, minus));
        hn::StoreU(hn::IfThenElse(is_finite, hn::Sub(x, sent), hn::LoadU(d, r + at)), d, r + at);
      }
    }
    // Each byte of a word has a code; its lowest byte gets all four.
    const auto bytes = ToBytes(code);
    const auto pairs = hn::Or(bytes, hn::ShiftRight<6>(bytes));
    const auto fours = hn::And(hn::Or(pairs, hn::ShiftRight<12>(pairs)), hn::Set(U(), 0xff));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(I(), fours)), d8, codes);
  }
}

void EncodeTernaryT(const float* g, float* r, float threshold, uint8_t* codes, size_t n) {
  r != nullptr ? EncodeTernaryOf<true>(g, r, threshold, codes, n)
               : EncodeTernaryOf<false>(g, r, threshold, codes, n);
}

void DecodeTernaryT(const uint8_t* codes, float threshold, float* out, size_t n) {
  const float values[4] = {0.0f, threshold, FloatOf(uint32_t{kNanScale} << 16), -threshold};
  alignas(64) float by_code[kLanes];
  alignas(64) uint32_t shift[kLanes];
  for (size_t i = 0; i < kLanes; ++i) {
    by_code[i] = values[i % 4];
    shift[i] = static_cast<uint32_t>(2 * i);
  }
  const V table = hn::Load(F(), by_code);
  const auto shifts = hn::Load(U(), shift);
  for (size_t i = 0; i < n; i += kLanes, codes += kLanes / 4) {
    uint32_t word = 0;
    memcpy(&word, codes, kLanes / 4);
    const auto code = hn::And(hn::Shr(hn::Set(U(), word), shifts), hn::Set(U(), 3));
    hn::StoreU(hn::TableLookupLanes(table, hn::IndicesFromVec(F(), code)), F(), out + i);
  }
}

void FromBf16T(const uint8_t* in, float* out, size_t n) {
  const F d;
  ForEach(
      n, [&](size_t i) HWY_ATTR { hn::StoreU(LoadBf16(in + 2 * i), d, out + i); },
      [&](size_t i) { Poke(out, i, thinwire::FromBf16(Half(in, i))); });
}

void FromF16T(const uint8_t* in, float* out, size_t n) {
  const F d;
  const Du16 d16;
  const U du;
  ForEach(
      n,
      [&](size_t i) HWY_ATTR {
        const auto half =
            hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(in) + i));
        const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000)));
        const auto magnitude = hn::And(half, hn::Set(du, 0x7fff));
        const auto shifted = hn::ShiftLeft<13>(magnitude);
        const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
        const auto special = hn::Or(shifted, hn::Set(du, kInfBits));
        const auto nan = hn::Gt(hn::BitCast(I(), magnitude), hn::Set(I(), 0x7c00));
        const auto quiet = hn::IfThenElseZero(hn::RebindMask(du, nan), hn::Set(du, 0x400000));
        const auto tiny = hn::BitCast(
            du, hn::Mul(hn::ConvertTo(d, hn::BitCast(I(), magnitude)), hn::Set(d, 0x1p-24f)));
        const auto is_special = hn::Gt(hn::BitCast(I(), magnitude), hn::Set(I(), 0x7bff));
        const auto is_tiny = hn::Lt(hn::BitCast(I(), magnitude), hn::Set(I(), 0x400));
        auto bits = hn::IfThenElse(hn::RebindMask(du, is_tiny), tiny, normal);
        bits = hn::IfThenElse(hn::RebindMask(du, is_special), hn::Or(special, quiet), bits);
        hn::StoreU(hn::BitCast(d, hn::Or(bits, sign)), d, out + i);
      },
      [&](size_t i) { Poke(out, i, thinwire::FromF16(Half(in, i))); });
}

void ToF16T(const float* in, uint8_t* out, size_t n) {
  const F d;
  const Du16 d16;
  const U du;
  ForEach(
      n,
      [&](size_t i) HWY_ATTR {
        const auto bits = hn::BitCast(du, hn::LoadU(d, in + i));
        const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
        const auto magnitude = hn::And(bits, hn::Set(du, kAbsMask));
        const auto m = hn::BitCast(I(), magnitude);
        const auto even = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
        const auto normal = hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du, 112u << 23)),
                                                       hn::Add(even, hn::Set(du, 0xfff))));
        const auto tiny =
            hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))),
                    hn::Set(du, BitsOf(0.5f)));
        const auto nan =
            hn::Or(hn::Set(du, 0x7e00), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ff)));
        auto half =
            hn::IfThenElse(hn::RebindMask(du, hn::Lt(m, hn::Set(I(), 0x38800000))), tiny, normal);
        half = hn::IfThenElse(hn::RebindMask(du, hn::Gt(m, hn::Set(I(), 0x477fefff))),
                              hn::Set(du, 0x7c00), half);
        half = hn::IfThenElse(hn::RebindMask(du, hn::Gt(m, hn::Set(I(), 0x7f800000))), nan, half);
        hn::StoreU(hn::DemoteTo(d16, hn::BitCast(I(), hn::Or(half, sign))), d16,
                   reinterpret_cast<uint16_t*>(out) + i);
      },
      [&](size_t i) { PutHalf(out, i, thinwire::ToF16(Peek(in, i))); });
}

void AddT(float* sum, const float* x, size_t n) {
  const F d;
  ForEach(
      n,
      [&](size_t i)
          HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, x + i)), d, sum + i); },
      [&](size_t i) { Poke(sum, i, Peek(sum, i) + Peek(x, i)); });
}

void ScaleT(float* x, float factor, size_t n) {
  const F d;
  ForEach(
      n,
      [&](size_t i)
          HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i); },
      [&](size_t i) { Poke(x, i, Peek(x, i) * factor); });
}

void ScaledSumT(const float* x, float factor, const float* y, float* sum, size_t n) {
  const F d;
  const V f = hn::Set(d, factor);
  ForEach(
      n,
      [&](size_t i) HWY_ATTR {
        hn::StoreU(hn::Add(hn::Mul(hn::LoadU(d, x + i), f), hn::LoadU(d, y + i)), d, sum + i);
      },
      [&](size_t i) { Poke(sum, i, Peek(x, i) * factor + Peek(y, i)); });
}

void CopyFiniteT(const float* from, float* to, size_t n) {
  const F d;
  const auto infinity = hn::Set(I(), static_cast<int32_t>(kInfBits));
  ForEach(
      n,
      [&](size_t i) HWY_ATTR {
        const V x = hn::LoadU(d, from + i);
        const auto finite = hn::RebindMask(d, hn::Lt(Magnitude(x), infinity));
        hn::StoreU(hn::IfThenElse(finite, x, hn::LoadU(d, to + i)), d, to + i);
      },
      [&](size_t i) {
        const float x = Peek(from, i);
        if (IsFinite(x)) Poke(to, i, x);
      });
}

const char* TargetNameT() { return hwy::TargetName(HWY_TARGET); }

}  // namespace thinwire::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

// One instruction set for all machines; on NEON the compiler must be told which.
HWY_BEFORE_NAMESPACE();
namespace thinwire::simd {

void StreamCopy(float* to, const float* from, size_t count) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::FixedTag<float, 4> four;
  constexpr size_t kAlign = 4 * sizeof(float);
  const size_t beyond = reinterpret_cast<uintptr_t>(to) % kAlign;
  const size_t head = std::min(count, (kAlign - beyond) % kAlign / sizeof(float));
  std::copy_n(from, head, to);
  size_t i = head;
  for (; i + 4 <= count; i += 4) hn::Stream(hn::LoadU(four, from + i), four, to + i);
  hwy::FlushStream();
  std::copy(from + i, from + count, to + i);
}

}  // namespace thinwire::simd
HWY_AFTER_NAMESPACE();

namespace thinwire::simd {

HWY_EXPORT(EncodeBlocksT);
HWY_EXPORT(DecodeBlocksT);
HWY_EXPORT(DecodeAddBlocksT);
HWY_EXPORT(ReduceBlocksT);
HWY_EXPORT(ReduceBf16T);
HWY_EXPORT(ReduceFp32T);
HWY_EXPORT(EncodeBf16T);
HWY_EXPORT(EncodeTernaryT);
HWY_EXPORT(DecodeTernaryT);
HWY_EXPORT(FromBf16T);
HWY_EXPORT(FromF16T);
HWY_EXPORT(ToF16T);
HWY_EXPORT(AddT);
HWY_EXPORT(ScaleT);
HWY_EXPORT(ScaledSumT);
HWY_EXPORT(CopyFiniteT);
HWY_EXPORT(AddAndScanT);
HWY_EXPORT(ScanT);
HWY_EXPORT(FindKeyT);
HWY_EXPORT(FindBeyondT);
HWY_EXPORT(KeepWithinT);
HWY_EXPORT(EncodeEntriesT);
HWY_EXPORT(TargetNameT);

void EncodeBlocks(const Blocks& blocks, const float* g, float* r, uint8_t* scales, uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeBlocksT)(blocks, g, r, scales, codes);
}
void DecodeBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeBlocksT)(blocks, scales, codes, out);
}
void DecodeAddBlocks(const Blocks& blocks, const uint8_t* scales, const uint8_t* codes,
                     float* sum) {
  HWY_DYNAMIC_DISPATCH(DecodeAddBlocksT)(blocks, scales, codes, sum);
}
void ReduceBlocks(const Blocks& blocks, int down_bits, const Reduction& args) {
  HWY_DYNAMIC_DISPATCH(ReduceBlocksT)(blocks, down_bits, args);
}
size_t ReduceBf16(const Reduction& args, size_t n) {
  return HWY_DYNAMIC_DISPATCH(ReduceBf16T)(args, n);
}
size_t ReduceFp32(const Reduction& args, size_t n) {
  return HWY_DYNAMIC_DISPATCH(ReduceFp32T)(args, n);
}
void EncodeBf16(const float* g, float* r, uint8_t* wire, size_t n) {
  HWY_DYNAMIC_DISPATCH(EncodeBf16T)(g, r, wire, n);
}
void EncodeTernary(const float* g, float* r, float threshold, uint8_t* codes, size_t n) {
  HWY_DYNAMIC_DISPATCH(EncodeTernaryT)(g, r, threshold, codes, n);
}
void DecodeTernary(const uint8_t* codes, float threshold, float* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(DecodeTernaryT)(codes, threshold, out, n);
}
void FromBf16(const uint8_t* in, float* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(FromBf16T)(in, out, n);
}
void FromF16(const uint8_t* in, float* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(FromF16T)(in, out, n);
}
void ToF16(const float* in, uint8_t* out, size_t n) { HWY_DYNAMIC_DISPATCH(ToF16T)(in, out, n); }
void Add(float* sum, const float* x, size_t n) { HWY_DYNAMIC_DISPATCH(AddT)(sum, x, n); }
void Scale(float* x, float factor, size_t n) { HWY_DYNAMIC_DISPATCH(ScaleT)(x, factor, n); }
void ScaledSum(const float* x, float factor, const float* y, float* sum, size_t n) {
  HWY_DYNAMIC_DISPATCH(ScaledSumT)(x, factor, y, sum, n);
}
void CopyFinite(const float* from, float* to, size_t n) {
  HWY_DYNAMIC_DISPATCH(CopyFiniteT)(from, to, n);
}
size_t AddAndScan(const float* g, float* r, const Momentum& momentum, size_t n, uint32_t begin,
                  const Thresholds& keys, uint32_t* index, uint32_t* bits) {
  return HWY_DYNAMIC_DISPATCH(AddAndScanT)(g, r, momentum, n, begin, keys, index, bits);
}
size_t Scan(const float* x, size_t n, uint32_t begin, uint32_t low, uint32_t highest,
            uint32_t* index, uint32_t* bits) {
  return HWY_DYNAMIC_DISPATCH(ScanT)(x, n, begin, low, highest, index, bits);
}
RankedKey FindKey(const uint32_t* bits, size_t count, size_t rank, uint32_t guess,
                  uint32_t* spare) {
  return HWY_DYNAMIC_DISPATCH(FindKeyT)(bits, count, rank, guess, spare);
}
size_t FindBeyond(const Border& border, uint32_t low, const uint32_t* bits, size_t count,
                  uint32_t* places) {
  return HWY_DYNAMIC_DISPATCH(FindBeyondT)(border, low, bits, count, places);
}
size_t KeepWithin(const Border& border, uint32_t* index, uint32_t* bits, size_t count) {
  return HWY_DYNAMIC_DISPATCH(KeepWithinT)(border, index, bits, count);
}
size_t EncodeEntries(uint32_t sure, uint32_t* index, uint32_t* bits, size_t count,
                     uint8_t* entries) {
  return HWY_DYNAMIC_DISPATCH(EncodeEntriesT)(sure, index, bits, count, entries);
}

// With only one target, as on ARM, the macro accepts no name with a namespace.
const char* TargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameT)(); }

}  // namespace thinwire::simd

namespace thinwire {

bool SimdAvailable() { return hwy::SupportedTargets() & HWY_TARGETS; }

const char* SimdTargetName() { return simd::TargetName(); }

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets())
    names.push_back(hwy::TargetName(target));
  return names;
}

void ForceSimdTarget(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (hwy::TargetName(target) != name) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return;
  }
}

}  // namespace thinwire
#endif  // HWY_ONCE
