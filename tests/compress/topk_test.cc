// topk sends exactly the k largest elements, whatever the guess was, and refuses malformed shards.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "tests/compress/values.h"
#include "tests/effort.h"

namespace thinwire {
namespace {

CodecSpec TopK(uint32_t density_ppm) {
  return {.id = codecs::TopK::kTraits.id, .density_ppm = density_ppm};
}

struct Result {
  std::vector<uint8_t> wire;
  std::vector<float> residual, velocity;
  friend bool operator==(const Result&, const Result&) = default;
};

// `threshold` may be null.
Result Encode(const Backend& backend, const CodecSpec& spec, std::vector<float> g, Result state,
              float* threshold) {
  state.wire.assign(EncodedBytes(spec, g.size()), 0xAA);
  backend.Encode(
      spec, {.gradient = {g.data(), g.size()},
             .residual = state.residual.empty() ? nullptr : state.residual.data(),
             .wire = state.wire.data(),
             .threshold = threshold,
             .momentum = {0.9f, false, state.velocity.empty() ? nullptr : state.velocity.data()}});
  return state;
}

void ExpectSame(const CodecSpec& spec, const std::vector<float>& g, const Result& before,
                float guess, const std::string& what) {
  const Result slow = Encode(ScalarBackend(), spec, g, before, nullptr);
  Result fast = Encode(CpuBackend(), spec, g, before, guess == 0 ? nullptr : &guess);
  ASSERT_TRUE(CheckWire(spec, slow.wire, g.size()).ok()) << what;
  ASSERT_EQ(fast.wire, slow.wire) << what;
  ASSERT_EQ(fast.velocity, slow.velocity) << what;
  for (size_t i = 0; i < slow.residual.size(); ++i) {
    ASSERT_EQ(BitsOf(fast.residual[i]), BitsOf(slow.residual[i])) << what << ", residual " << i;
  }
}

TEST(TopK, IsExactAtEverySizeDensityAndGuess) {
  size_t number = 0;
  for (const size_t numel :
       {1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 20000, 65535, 65536, 65537, 131073, 200000}) {
    for (const uint32_t ppm : {1u, 1000u, 10000u, 300000u, 1000000u}) {
      // Guesses: none, far too low, about right, too high, far too high.
      for (const float guess : {0.0f, 1e-30f, 2.3f, 4.0f, 1e30f}) {
        if (kSanitized && numel > 70000 && guess != 2.3f) continue;
        for (const int state : {0, 1, 2, 3}) {
          if (numel < 70000 && !IsTried(number++)) continue;
          Result before;
          if (state > 0) before.residual = Normal(numel, 7);
          if (state > 1) before.velocity = Normal(numel, 8);
          CodecSpec spec = TopK(ppm);
          spec.masking = state < 3;
          ExpectSame(spec, Normal(numel, numel), before, guess,
                     std::to_string(numel) + " at " + std::to_string(ppm) + ", guess " +
                         std::to_string(guess) + ", state " + std::to_string(state));
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(TopK, TiesGoToTheLowestIndex) {
  const std::vector<float> g(70000, -3.0f);
  for (const uint32_t ppm : {100u, 10000u, 500000u, 1000000u}) {
    ExpectSame(TopK(ppm), g, {{}, std::vector<float>(g.size()), {}}, 0, "all equal");
    const Result result = Encode(CpuBackend(), TopK(ppm), g, {}, nullptr);
    std::vector<float> decoded(g.size());
    CpuBackend().Decode(TopK(ppm), result.wire.data(), {decoded.data(), g.size()});
    const size_t k = EntryCount(ppm, g.size());
    for (size_t i = 0; i < g.size(); ++i) ASSERT_EQ(decoded[i], i < k ? -3.0f : 0.0f) << i;
  }
}

// NaN and Inf are sent first and do not change residual and momentum, even if more than k.
TEST(TopK, ElementsThatAreNotFinite) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  for (const size_t numel : {5000, 70000}) {
    for (const size_t bad : {size_t{1}, size_t{30}, numel / 100, numel / 2, numel}) {
      std::vector<float> g = Normal(numel, 3);
      for (size_t i = 0; i < bad; ++i)
        g[i * 7919 % numel] = i % 3 == 0 ? inf : i % 3 == 1 ? nan : -nan;
      g[numel / 3] = std::numeric_limits<float>::max();  // plus the residual it overflows
      Result before{{}, Normal(numel, 4), Normal(numel, 5)};
      before.residual[numel / 3] = std::numeric_limits<float>::max();
      for (const float guess : {0.0f, 2.0f, 50.0f, 1e30f}) {
        ExpectSame(TopK(10000), g, before, guess,
                   std::to_string(bad) + " bad of " + std::to_string(numel));
        if (testing::Test::HasFatalFailure()) return;
        const Result after = Encode(CpuBackend(), TopK(10000), g, before, nullptr);
        for (size_t i = 0; i < numel; ++i) {
          ASSERT_TRUE(std::isfinite(after.residual[i])) << i;
          if (std::isfinite(g[i])) continue;
          ASSERT_EQ(after.residual[i], before.residual[i]) << i;
        }
      }
    }
  }
}

// Many steps with a carried threshold give the same results as without one.
TEST(TopK, TheCarriedThresholdChangesNothing) {
  const CodecSpec spec = TopK(10000);
  constexpr size_t kNumel = 100000;
  Result fast{{}, std::vector<float>(kNumel), {}}, slow = fast;
  float threshold = 0;
  for (int step = 0; step < 30; ++step) {
    const float spread = step == 10 ? 100.0f : step == 20 ? 1e-3f : 1.0f;
    const std::vector<float> g = Normal(kNumel, step, spread);
    fast = Encode(CpuBackend(), spec, g, fast, &threshold);
    slow = Encode(ScalarBackend(), spec, g, slow, nullptr);
    ASSERT_EQ(fast, slow) << step;
    EXPECT_GT(threshold, 0.0f);
  }
}

// The values sent and kept add up to the input, element by element.
TEST(TopK, NothingIsLost) {
  const CodecSpec spec = TopK(5000);
  constexpr size_t kNumel = 30000;
  Result state{{}, std::vector<float>(kNumel), {}};
  std::vector<double> in(kNumel), sent(kNumel);
  for (int step = 0; step < 100; ++step) {
    const std::vector<float> g = Normal(kNumel, step);
    state = Encode(CpuBackend(), spec, g, state, nullptr);
    std::vector<float> decoded(kNumel);
    CpuBackend().Decode(spec, state.wire.data(), {decoded.data(), kNumel});
    for (size_t i = 0; i < kNumel; ++i) {
      in[i] += g[i];
      sent[i] += decoded[i];
    }
  }
  for (size_t i = 0; i < kNumel; ++i) ASSERT_NEAR(sent[i] + state.residual[i], in[i], 1e-4) << i;
}

TEST(TopK, TheWarmUpDividesTheDensityByFour) {
  const CodecSpec spec = *CodecSpec::Parse("topk:density=0.001,warmup=400");
  std::vector<uint32_t> seen;
  for (uint64_t step = 0; step < 500; ++step) {
    const uint32_t ppm = spec.AtStep(step).density_ppm;
    if (seen.empty() || seen.back() != ppm) seen.push_back(ppm);
  }
  EXPECT_EQ(seen, (std::vector<uint32_t>{250000, 62500, 15625, 3906, 1000}));
  EXPECT_EQ(spec.AtStep(99).density_ppm, 250000u);
  EXPECT_EQ(spec.AtStep(400).density_ppm, 1000u);
}

// Any bytes are refused, or decoded within the shard. With a sanitizer this finds overruns.
TEST(CheckWire, ArbitraryBytesNeverReachBeyondTheShard) {
  std::mt19937_64 random(11);
  int accepted = 0, refused = 0;
  for (const CodecTraits& codec : kCodecs) {
    for (int round = 0; round < 400; ++round) {
      const size_t numel = random() % 3 == 0 ? 60000 + random() % 80000 : 1 + random() % 3000;
      const CodecSpec spec{.id = codec.id,
                           .density_ppm = 1 + static_cast<uint32_t>(random() % 20000)};
      std::vector<float> g = Normal(numel, random()), out(numel);
      std::vector<uint8_t> wire(EncodedBytes(spec, numel));
      CpuBackend().Encode(spec, {g.data(), numel}, nullptr, wire.data());
      const int changes = static_cast<int>(random() % 4);
      for (int i = 0; i < changes; ++i) {
        const size_t at =
            random() % (random() % 2 ? wire.size() : std::min<size_t>(wire.size(), 64));
        wire[at] = static_cast<uint8_t>(random());
      }
      if (random() % 8 == 0) wire.resize(wire.size() - 1);
      if (!CheckWire(spec, wire, numel).ok()) {
        ++refused;
        continue;
      }
      ++accepted;
      CpuBackend().Decode(spec, wire.data(), {out.data(), numel});
      CpuBackend().DecodeAdd(spec, wire.data(), out);
    }
  }
  EXPECT_GT(accepted, 500);
  EXPECT_GT(refused, 100);
}

TEST(CheckWire, NamesWhatIsWrongWithEntries) {
  const CodecSpec spec = TopK(100000);
  std::vector<float> g = Normal(100, 1);
  const std::vector<uint8_t> good = Encode(CpuBackend(), spec, g, {}, nullptr).wire;
  const auto message = [&](size_t at, uint8_t value) {
    std::vector<uint8_t> wire = good;
    wire[at] = value;
    return std::string(CheckWire(spec, wire, 100).message());
  };
  EXPECT_NE(message(0, 9).find("add up to 9, expected 10"), std::string::npos);
  EXPECT_NE(message(0, 11).find("more than the 10"), std::string::npos);
  EXPECT_NE(message(16 + 36, 200).find("do not ascend below 100"), std::string::npos);
  EXPECT_NE(message(16, 99).find("do not ascend"), std::string::npos);
}

}  // namespace
}  // namespace thinwire
