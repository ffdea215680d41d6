// FORMAT.md's rules for blocks, scales and half floats, each tested alone.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "compress/backend.h"
#include "compress/element_math.h"

namespace thinwire {
namespace {

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

// g++ 12 has _Float16 in C++ on x86 only.
#ifdef __aarch64__
using CompilersHalf = __fp16;
#else
using CompilersHalf = _Float16;
#endif

// Compares with the compiler's own conversion, on every half, its neighbours and the ties.
TEST(HalfFloat, RoundsLikeTheHardwareType) {
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const float value = FromF16(static_cast<uint16_t>(half));
    ASSERT_EQ(value, static_cast<float>(std::bit_cast<CompilersHalf>(static_cast<uint16_t>(half))))
        << half;
    for (const uint32_t offset : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu}) {
      const float near = FloatOf(BitsOf(value) + offset);
      ASSERT_EQ(ToF16(near), std::bit_cast<uint16_t>(static_cast<CompilersHalf>(near)))
          << half << " " << offset;
    }
  }
}

// D(x) + r is x to the bit, wherever the block is finite: nothing is lost in a step.
TEST(ErrorFeedbackRule, DecodedPlusResidualIsTheInput) {
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const size_t numel = 100000;
    std::mt19937_64 random(20240607);
    std::normal_distribution<float> normal;
    std::vector<float> g(numel), r(numel), d(numel);
    for (float& value : g) value = normal(random);
    std::vector<uint8_t> wire(EncodedBytes(spec, numel));
    CpuBackend().Encode(spec, {g.data(), numel}, r.data(), wire.data());
    CpuBackend().Decode(spec, wire.data(), {d.data(), numel});
    for (size_t i = 0; i < numel; ++i) ASSERT_EQ(double{d[i]} + double{r[i]}, double{g[i]}) << i;
  }
}

// MXNet's rule of type 2bit, as in its kernel: residual += gradient; if that reaches the threshold,
// the threshold is sent and subtracted; likewise for the negative one; otherwise 0 is sent.
TEST(TernaryRule, IsMxnetsOfTwoBits) {
  constexpr size_t kNumel = 5003;
  for (const char* text : {"ternary", "ternary:threshold=0.1", "ternary:threshold=3"}) {
    const CodecSpec spec = Spec(text);
    const float t = spec.threshold;
    for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
      std::mt19937_64 random(20240607);
      std::normal_distribution<float> normal;
      std::vector<float> residual(kNumel), r(kNumel), d(kNumel), g(kNumel);
      size_t sent = 0;
      for (int step = 0; step < 20; ++step) {
        for (float& value : g) {
          // About a third are multiples of a fifth of the threshold, so that sums hit it.
          value =
              random() % 3 == 0 ? t / 5 * static_cast<float>(random() % 11) - t : normal(random);
        }
        std::vector<uint8_t> wire(EncodedBytes(spec, kNumel));
        backend->Encode(spec, {g.data(), kNumel}, r.data(), wire.data());
        backend->Decode(spec, wire.data(), {d.data(), kNumel});
        for (size_t i = 0; i < kNumel; ++i) {
          residual[i] += g[i];
          float expected = 0.0f;
          if (residual[i] >= t) {
            expected = t;
            residual[i] -= t;
          } else if (residual[i] <= -t) {
            expected = -t;
            residual[i] += t;
          }
          ASSERT_EQ(BitsOf(d[i]), BitsOf(expected)) << text << ", step " << step << ", " << i;
          ASSERT_EQ(r[i], residual[i]) << text << ", step " << step << ", " << i;
          sent += expected != 0.0f ? 1 : 0;
        }
      }
      EXPECT_GT(sent, kNumel) << text;
      EXPECT_LT(sent, 20 * kNumel) << text;
    }
  }
}

// Each element that is not finite becomes NaN on every rank, without affecting other elements or
// the next step.
TEST(TernaryRule, AnElementThatIsNotFiniteIsNanAndKeepsItsResidual) {
  const float inf = std::numeric_limits<float>::infinity(), most = 3.4028235e38f;
  const CodecSpec spec = Spec("ternary");
  for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
    for (const float special : {inf, -inf, std::nanf(""), most, -most}) {
      std::vector<float> g(103), r(103, 0.25f), d(103);
      for (const size_t i : {3, 64, 101}) g[i] = special;
      r[64] = special == most ? most : r[64];  // only the sum is infinite
      std::vector<uint8_t> wire(EncodedBytes(spec, 103));
      const std::vector<float> before = r;
      backend->Encode(spec, {g.data(), 103}, r.data(), wire.data());
      backend->Decode(spec, wire.data(), {d.data(), 103});
      for (size_t i = 0; i < 103; ++i) {
        const float x = g[i] + before[i];
        ASSERT_EQ(std::isnan(d[i]), !std::isfinite(x)) << special << " " << i;
        if (std::isnan(d[i])) {
          ASSERT_EQ(r[i], before[i]) << special << " " << i;
        } else {
          ASSERT_EQ(r[i], x - d[i]) << special << " " << i;
        }
      }
    }
  }
}

TEST(BlockRules, TinyZeroAndNonFiniteBlocks) {
  for (const char* text : {"int8", "int4", "onebit", "int4:hadamard=1"}) {
    const CodecSpec spec = Spec(text);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    for (const float special : {0.0f, 1e-38f, 7e-31f, inf, -inf, nan, 0x1p127f}) {
      std::vector<float> g(256, 0.0f), r(256, 1e-33f), d(256);
      const bool tiny = special < 1e-30f && special > -1e-30f;
      // onebit and the transform judge a block by all its elements, so all of them are special
      // there. The exception is tiny values, of which the transform would make a larger one.
      const bool all = spec.traits().qmax == 1 || (spec.hadamard && !tiny);
      if (all) std::fill(g.begin(), g.end(), special);
      g[9] = special;
      std::vector<uint8_t> wire(EncodedBytes(spec, 256));
      CpuBackend().Encode(spec, {g.data(), 256}, r.data(), wire.data());
      CpuBackend().Decode(spec, wire.data(), {d.data(), 256});
      for (size_t i = 0; i < 256; ++i) {
        ASSERT_EQ(std::isnan(d[i]), !tiny) << special;
        ASSERT_TRUE(!tiny || BitsOf(d[i]) == 0u) << "exactly +0";
        ASSERT_EQ(r[i], tiny && g[i] != 0.0f ? special + 1e-33f : 1e-33f) << special << " " << i;
      }
    }
  }
}

// Values of m / qmax one ulp above a bf16 value take the next scale up. Random data never has them.
TEST(BlockRules, ScalesAreRoundedUpByTheLastBit) {
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const float qmax = static_cast<float>(spec.traits().qmax);
    int found = 0;
    for (uint32_t upper = 0x3f80; upper < 0x3fff; ++upper) {
      const uint32_t wanted = upper << 16 | 1;
      const uint32_t around = BitsOf(FloatOf(wanted) * qmax);
      for (uint32_t bits = around - 8; bits <= around + 8; ++bits) {
        if (BitsOf(FloatOf(bits) / qmax) != wanted) continue;
        std::vector<float> g(256);
        g[17] = FloatOf(bits);
        for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
          std::vector<uint8_t> wire(EncodedBytes(spec, 256));
          backend->Encode(spec, {g.data(), 256}, nullptr, wire.data());
          ASSERT_EQ(wire[0] | wire[1] << 8, static_cast<int>(upper + 1)) << text << " " << bits;
          ++found;
        }
      }
    }
    EXPECT_GT(found, 100);
  }
}

// Fixes the order itself, so that the two implementations can't change it together: two small
// summands change the scale only if they are added to each other before the 257 in lane 0.
TEST(BlockRules, OneBitsLanesAreFoldedByHalves) {
  const std::tuple<size_t, size_t, int> cases[] = {{1, 33, 0x3f81},  // both in one lane
                                                   {1, 17, 0x3f81},  // when 16 are folded
                                                   {1, 9, 0x3f81},  {1, 5, 0x3f81},
                                                   {1, 3, 0x3f81},  // when 2 are folded
                                                   {1, 2, 0x3f80},  // 2 is added to 257 first
                                                   {2, 4, 0x3f80},  {8, 16, 0x3f80}};
  for (const auto& [first, second, scale] : cases) {
    std::vector<float> g(256);
    g[0] = 257.0f;
    g[first] = g[second] = 0x1p-16f;
    for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
      std::vector<uint8_t> wire(EncodedBytes(Spec("onebit"), 256));
      backend->Encode(Spec("onebit"), {g.data(), 256}, nullptr, wire.data());
      EXPECT_EQ(wire[0] | wire[1] << 8, scale) << first << " and " << second;
    }
  }
}

}  // namespace
}  // namespace thinwire
