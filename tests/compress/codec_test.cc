// The SIMD backend encodes and decodes to the scalar reference's bytes, residuals and values on
// every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "compress/codec_list.h"
#include "compress/element_math.h"
#include "tests/compress/target_test.h"
#include "tests/compress/values.h"
#include "tests/effort.h"

namespace thinwire {
namespace {

// Memory that begins `skew` bytes after an aligned address.
class Skewed {
 public:
  Skewed(size_t bytes, size_t skew) : memory_(bytes + 128), skew_(skew) {}
  uint8_t* data() {
    return memory_.data() + 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64 + skew_;
  }
  float* floats() { return reinterpret_cast<float*>(data()); }

 private:
  std::vector<uint8_t> memory_;
  size_t skew_;
};

// Copies to an address of any alignment.
void Copy(const std::vector<float>& from, uint8_t* to) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from.data());
  std::copy(bytes, bytes + from.size() * sizeof(float), to);
}

INSTANTIATE_TEST_SUITE_P(Simd, TargetTest, testing::ValuesIn(SimdTargets()),
                         [](const auto& info) { return info.param; });

void CheckEncode(const CodecSpec& spec, size_t numel, DType dtype, bool feedback, size_t skew) {
  const std::string what = spec.ToString() + " " + std::string(Name(dtype)) + " of " +
                           std::to_string(numel) + ", feedback " + std::to_string(feedback) +
                           ", skew " + std::to_string(skew);
  const std::vector<float> values = Values(numel, kSeed + numel);
  Skewed g(numel * 4, skew), r1(numel * 4, skew), r2(numel * 4, skew);
  const TensorView view{g.data(), numel, dtype};
  std::vector<uint8_t> plain(EncodedBytes(Spec("fp32"), numel));
  ScalarBackend().Encode(Spec("fp32"), {const_cast<float*>(values.data()), numel}, nullptr,
                         plain.data());
  ScalarBackend().Decode(Spec("fp32"), plain.data(), view);
  const std::vector<float> residual = Residuals(numel, numel);
  Copy(residual, r1.data());
  Copy(residual, r2.data());
  const Draws draws{kSeed, numel, spec.block * (numel % 3)};
  const size_t bytes = EncodedBytes(spec, numel);
  Skewed fast(bytes, skew), slow(bytes, skew);
  std::memset(fast.data(), 0xAA, bytes);  // padding must be written as well
  CpuBackend().Encode(spec, view, feedback ? r1.floats() : nullptr, fast.data(), draws);
  ScalarBackend().Encode(spec, view, feedback ? r2.floats() : nullptr, slow.data(), draws);
  ASSERT_TRUE(CheckWire(spec, {slow.data(), bytes}, numel).ok()) << what;
  ASSERT_TRUE(SameBits(fast.data(), slow.data(), bytes)) << what;
  ASSERT_TRUE(SameBits(r1.data(), r2.data(), numel * 4)) << what << ", residuals";

  Skewed out1(numel * 4, skew), out2(numel * 4, skew);
  CpuBackend().Decode(spec, slow.data(), {out1.data(), numel});
  ScalarBackend().Decode(spec, slow.data(), {out2.data(), numel});
  ExpectSameFloats(out1.floats(), out2.floats(), numel, what + ", decode");
  Copy(residual, out1.data());
  Copy(residual, out2.data());
  CpuBackend().DecodeAdd(spec, slow.data(), {out1.floats(), numel});
  ScalarBackend().DecodeAdd(spec, slow.data(), {out2.floats(), numel});
  ExpectSameFloats(out1.floats(), out2.floats(), numel, what + ", decode-add");
}

TEST_P(TargetTest, EveryLengthFrom0To4097) {
  for (const CodecTraits& codec : kCodecs) {
    for (size_t numel = 0; numel <= 4097; numel = NextLength(numel)) {
      CheckEncode({.id = codec.id}, numel, DType::kF32, true, numel % 5);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_P(TargetTest, DTypesBlocksAndAlignments) {
  size_t number = 0;
  for (const char* text : {"fp32",
                           "bf16",
                           "int8",
                           "int4",
                           "int8:block=128",
                           "int4:block=128",
                           "int8:block=1024",
                           "int4:block=4096",
                           "onebit",
                           "onebit:block=128",
                           "onebit:block=4096",
                           "topk",
                           "topk:density=0.4",
                           "topk:density=1",
                           "int8:rounding=stochastic",
                           "int8:rounding=stochastic,block=128",
                           "int4:rounding=stochastic,block=1024",
                           "int4:hadamard=1",
                           "int4:rounding=stochastic,hadamard=1,seed=5",
                           "adaptive:bits=6",
                           "adaptive:bits=0.5",
                           "adaptive:bits=1.0625,floor=1",
                           "adaptive:floor=2,seed=3",
                           "ternary:threshold=0.01"}) {
    ++number;  // so that IsTried picks other combinations for each codec
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const size_t numel :
           {1, 3, 127, 128, 129, 255, 256, 257, 1000, 4096, 4097, 10007, 65536}) {
        for (const bool feedback : {false, true}) {
          if (!IsTried(number++)) continue;
          CheckEncode(Spec(text), numel, dtype, feedback, (numel + feedback) % 7);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// Rounding may make qmax times a scale exceed qmax. For some scales one draw in 65536 would then
// make int8's sum 128.
TEST_P(TargetTest, StochasticCodesOfTheLargestElementsStayInRange) {
  constexpr size_t kNumel = 8192;
  for (const char* text : {"int8:rounding=stochastic", "int4:rounding=stochastic"}) {
    const CodecSpec spec = Spec(text);
    for (uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
      const float scale = FloatOf(127u << 23 | mantissa << 16);
      const float largest = static_cast<float>(spec.traits().qmax) * scale;
      std::vector<float> g(kNumel);
      for (size_t i = 0; i < kNumel; ++i) g[i] = i % 2 == 0 ? largest : -largest;
      const Draws draws{.stream = mantissa};
      std::vector<uint8_t> wire(EncodedBytes(spec, kNumel)), want(wire.size());
      std::vector<float> r(kNumel), kept(kNumel);
      CpuBackend().Encode(spec, {g.data(), kNumel}, r.data(), wire.data(), draws);
      ScalarBackend().Encode(spec, {g.data(), kNumel}, kept.data(), want.data(), draws);
      ASSERT_EQ(wire, want) << text << " " << mantissa;
      ASSERT_TRUE(SameBits(r.data(), kept.data(), kNumel * sizeof(float))) << text << mantissa;
    }
  }
}

// Values decoded to an address inside a vector are written through the caches, at any size.
TEST_P(TargetTest, LargeTensorsDecodePastTheCaches) {
  constexpr size_t kNumel = (size_t{32} << 20) / sizeof(float) + 300;
  const std::vector<float> some = Values(1 << 14, kSeed);
  std::vector<float> g(kNumel);
  for (size_t i = 0; i < kNumel; ++i) g[i] = some[i % some.size()];
  for (const char* codec : {"int8", "int4", "onebit", "adaptive", "adaptive:bits=0.5"}) {
    const CodecSpec spec = Spec(codec);
    std::vector<uint8_t> wire(EncodedBytes(spec, kNumel));
    CpuBackend().Encode(spec, {g.data(), kNumel}, nullptr, wire.data());
    Skewed past(4 * kNumel, 0), through(4 * kNumel, 4);
    CpuBackend().Decode(spec, wire.data(), {past.data(), kNumel});
    CpuBackend().Decode(spec, wire.data(), {through.data(), kNumel});
    EXPECT_TRUE(SameBits(past.data(), through.data(), 4 * kNumel)) << codec;
  }
}

// Many random blocks of a kind that random data rarely contains: a maximum within an ulp or two of
// where rounding the scale up matters, beside values that lie on rounding ties.
TEST_P(TargetTest, DirectedBlocks) {
  std::mt19937_64 random(kSeed);
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const float qmax = static_cast<float>(spec.traits().qmax);
    for (int round = 0; round < 3000; ++round) {
      std::vector<float> g(256);
      const uint32_t exponent = 30 + random() % 190;
      const float step = FloatOf(exponent << 23 | (random() & 0x7f) << 16);
      for (float& value : g) {
        const int half_steps = static_cast<int>(random() % static_cast<uint64_t>(4 * qmax)) -
                               static_cast<int>(2 * qmax);
        value = 0.5f * static_cast<float>(half_steps) * step;
      }
      const uint32_t bits = BitsOf(qmax * step);
      g[random() % 256] = FloatOf(bits + static_cast<uint32_t>(random() % 7) - 3);
      std::vector<float> r1 = Residuals(256, round), r2;
      for (float& value : r1) value = random() % 4 == 0 ? value * step : 0.0f;
      r2 = r1;
      std::vector<uint8_t> fast(EncodedBytes(spec, 256)), slow(fast.size());
      CpuBackend().Encode(spec, {g.data(), 256}, r1.data(), fast.data());
      ScalarBackend().Encode(spec, {g.data(), 256}, r2.data(), slow.data());
      ASSERT_EQ(fast, slow) << text << ", round " << round;
      ASSERT_TRUE(SameBits(r1.data(), r2.data(), 1024)) << text << ", round " << round;
    }
  }
}

// The mean of 257 and zeros lies half-way between two bf16 values. Single summands of 2^-16 are
// lost beside 257 and pairs are not, so the order of the sum decides. Random data never does this.
TEST_P(TargetTest, TheOrderOfOneBitsSum) {
  std::mt19937_64 random(kSeed);
  const CodecSpec spec = Spec("onebit");
  int up = 0, down = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<float> g(256);
    for (uint64_t i = random() % 40; i > 0; --i) g[random() % 256] = 0x1p-16f;
    g[random() % 256] = round % 2 ? 257.0f : -257.0f;
    std::vector<uint8_t> fast(EncodedBytes(spec, 256)), slow(fast.size());
    CpuBackend().Encode(spec, {g.data(), 256}, nullptr, fast.data());
    ScalarBackend().Encode(spec, {g.data(), 256}, nullptr, slow.data());
    ASSERT_EQ(fast, slow) << "round " << round;
    const int scale = slow[0] | slow[1] << 8;
    ASSERT_TRUE(scale == 0x3f80 || scale == 0x3f81) << scale;
    ++(scale == 0x3f80 ? down : up);
  }
  EXPECT_GT(up, 100);
  EXPECT_GT(down, 100);
}

TEST_P(TargetTest, HalfFloatConversionsOfEveryBitPattern) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<float> fast(halves.size());
    std::vector<uint8_t> wire(EncodedBytes(Spec("fp32"), halves.size()));
    CpuBackend().Encode(Spec("fp32"), {halves.data(), halves.size(), dtype}, nullptr, wire.data());
    CpuBackend().Decode(Spec("fp32"), wire.data(), {fast.data(), fast.size()});
    std::vector<uint16_t> back(halves.size());
    CpuBackend().Decode(Spec("fp32"), wire.data(), {back.data(), back.size(), dtype});
    for (size_t i = 0; i < halves.size(); ++i) {
      const float want = dtype == DType::kBF16 ? FromBf16(halves[i]) : FromF16(halves[i]);
      ASSERT_EQ(std::isnan(fast[i]), std::isnan(want)) << i;
      if (std::isnan(want)) continue;
      ASSERT_EQ(BitsOf(fast[i]), BitsOf(want)) << i;
      ASSERT_EQ(back[i], halves[i]) << i;  // exact there and back
    }
  }
}

TEST(Backend, TheFastestTargetIsTheDefault) {
  EXPECT_EQ(SimdTargets().front(), (ForceSimdTarget(SimdTargets().front()), SimdTargetName()));
}

}  // namespace
}  // namespace thinwire
