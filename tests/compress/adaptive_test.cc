// adaptive's own rules: heads, widths that use up the budget, and malformed shards.
#include "compress/codecs/adaptive.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codecs/adaptive_levels.h"
#include "compress/types.h"
#include "tests/compress/values.h"

namespace thinwire {
namespace {

constexpr uint64_t kSeed = 20240607;

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

std::vector<uint8_t> Encode(const CodecSpec& spec, std::vector<float> values,
                            std::vector<float>* residual = nullptr) {
  std::vector<uint8_t> wire(EncodedBytes(spec, values.size()));
  CpuBackend().Encode(spec, {values.data(), values.size()},
                      residual == nullptr ? nullptr : residual->data(), wire.data());
  return wire;
}

std::vector<float> Decode(const CodecSpec& spec, const std::vector<uint8_t>& wire, size_t numel) {
  std::vector<float> values(numel);
  CpuBackend().Decode(spec, wire.data(), {values.data(), numel});
  return values;
}

// Returns the widths of a shard's blocks, read from its wire bytes.
std::vector<int> WidthsOf(const CodecSpec& spec, const std::vector<uint8_t>& wire, size_t numel,
                          Walk* walk) {
  const Shard shard(spec, numel);
  InfoOf(spec.id).simd.begin(shard, wire.data(), walk);
  std::vector<int> widths;
  for (size_t b = 0; b < shard.layout.blocks; ++b) {
    widths.push_back(AdaptiveWidth(Get<uint16_t>(wire.data(), b),
                                   walk->threshold - (b < walk->raised ? 1 : 0),
                                   static_cast<int>(spec.floor)));
  }
  return widths;
}

// Blocks of sizes that differ by powers of two and by less.
std::vector<float> Layers(size_t blocks, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(blocks * kTransform);
  for (size_t b = 0; b < blocks; ++b) {
    const float size = std::exp2(static_cast<float>(random() % 4096) / 256.0f);
    for (size_t i = 0; i < kTransform; ++i) values[b * kTransform + i] = size * normal(random);
  }
  return values;
}

TEST(Adaptive, WidthsUseTheBudgetAndNoMore) {
  for (const char* text : {"adaptive", "adaptive:bits=0.5", "adaptive:bits=1.0625,floor=1",
                           "adaptive:bits=6", "adaptive:bits=2.5,floor=2"}) {
    const CodecSpec spec = Spec(text);
    for (const size_t blocks : {1, 2, 7, 64, 1000}) {
      const std::vector<uint8_t> wire = Encode(spec, Layers(blocks, kSeed + blocks));
      Walk walk;
      const std::vector<int> widths = WidthsOf(spec, wire, blocks * kTransform, &walk);
      const auto budget = static_cast<int>(AdaptivePlanes(spec.sixteenths, blocks));
      EXPECT_EQ(std::accumulate(widths.begin(), widths.end(), 0), budget)
          << text << ", " << blocks << " blocks";
      for (const int width : widths) {
        EXPECT_GE(width, static_cast<int>(spec.floor));
        EXPECT_LE(width, kMaxWidth);
      }
    }
  }
}

// With equal heads and a budget between two widths, the first blocks get the bits left over.
TEST(Adaptive, WhatIsLeftGoesToTheFirstBlocks) {
  const CodecSpec spec = Spec("adaptive:bits=1.5");
  const std::vector<uint8_t> wire = Encode(spec, std::vector<float>(5 * kTransform, 1.0f));
  Walk walk;
  EXPECT_EQ(WidthsOf(spec, wire, 5 * kTransform, &walk), (std::vector<int>{2, 2, 2, 1, 1}));
  EXPECT_EQ(walk.threshold, 0x3f80 - 255);
  EXPECT_EQ(walk.raised, 3u);
}

// A block of twice the size gets one more bit.
TEST(Adaptive, ABitForEachFactorOfTwo) {
  std::vector<float> values;
  for (const float size : {16.0f, 8.0f, 4.0f, 2.0f, 1.0f}) {
    values.insert(values.end(), kTransform, size);
  }
  const CodecSpec spec = Spec("adaptive");
  Walk walk;
  EXPECT_EQ(WidthsOf(spec, Encode(spec, values), values.size(), &walk),
            (std::vector<int>{4, 3, 2, 1, 0}));
  const CodecSpec floored = Spec("adaptive:bits=3,floor=2");
  EXPECT_EQ(WidthsOf(floored, Encode(floored, values), values.size(), &walk),
            (std::vector<int>{5, 4, 2, 2, 2}));
}

TEST(Adaptive, ErrorIsThatOfTheLevels) {
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  std::vector<float> values(size_t{1} << 18);
  for (float& value : values) value = normal(random);
  // The least error of a quantiser with that many levels: Max, 1960, table I.
  const std::pair<const char*, double> cases[] = {
      {"adaptive:bits=1", 0.3634},   {"adaptive:bits=2", 0.1175},   {"adaptive:bits=3", 0.03454},
      {"adaptive:bits=4", 0.009497}, {"adaptive:bits=5", 0.002499}, {"adaptive:bits=6", 0.00064}};
  for (const auto& [text, error] : cases) {
    const CodecSpec spec = Spec(text);
    const std::vector<float> decoded = Decode(spec, Encode(spec, values), values.size());
    double lost = 0, all = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      lost += std::pow(double{values[i]} - decoded[i], 2);
      all += std::pow(double{values[i]}, 2);
    }
    EXPECT_NEAR(lost / all, error, 0.06 * error) << text;
  }
}

// Blocks of every size, and one large element among zeros: decoded + residual is the input.
TEST(Adaptive, NothingIsLostInAStep) {
  for (const char* text : {"adaptive:bits=0.5", "adaptive", "adaptive:bits=6"}) {
    const CodecSpec spec = Spec(text);
    std::vector<float> values = Layers(40, kSeed);
    std::fill_n(values.begin() + 512, kTransform, 0.0f);
    values[700] = 1e4f;
    std::vector<float> residual(values.size(), 0.0f);
    const std::vector<uint8_t> wire = Encode(spec, values, &residual);
    const std::vector<float> decoded = Decode(spec, wire, values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const float scale = std::fabs(values[i]) + std::fabs(decoded[i]);
      ASSERT_NEAR(decoded[i] + residual[i], values[i], 1e-6f * scale) << text << ", " << i;
    }
  }
}

TEST(Adaptive, TinyHugeZeroAndNonFiniteBlocks) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  struct Case {
    float all;     // every element but one
    float one;     // element 9
    int head;      // -1: a plain block
    bool decoded;  // decodes to finite values
  };
  const Case cases[] = {{0.0f, 0.0f, 0, true},
                        {-0.0f, -0.0f, 0, true},
                        {1e-38f, 1e-38f, 0, true},
                        {0.0f, 0x1.8p-97f, 0, true},  // 1.5 / 16 of 2^-97 is below 2^-100
                        {0x1p-100f, 0x1p-100f, kFirstHead, true},
                        {0x1.fep-101f, 0x1.fep-101f, 0, true},
                        {1.0f, 1.0f, 0x3f80, true},
                        {-3.0f, -3.0f, 0x4040, true},
                        {0x1p70f, -0x1p70f, -1, true},  // squares overflow fp32
                        {0x1p-70f, -0x1p-70f, -1, true},
                        {0.0f, 0x1p119f, -1, true},  // the root mean square is 2^115
                        {0x1.fep115f, 0x1.fep115f, -1, true},
                        {0x1p116f, 0x1p116f, kNanScale, false},
                        {0x1p127f, 0x1p127f, kNanScale, false},
                        {0.0f, 0x1p127f, kNanScale, false},
                        {1.0f, kInf, kNanScale, false},
                        {1.0f, -kInf, kNanScale, false},
                        {1.0f, std::nanf(""), kNanScale, false}};
  const CodecSpec spec = Spec("adaptive");
  for (const Case& c : cases) {
    for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
      std::vector<float> g(300, c.all), r(300, 0.0f), d(300);
      g[9] = c.one;
      r[10] = c.decoded ? 0.0f : 1e-33f;
      std::vector<uint8_t> wire(EncodedBytes(spec, g.size()));
      backend->Encode(spec, {g.data(), g.size()}, r.data(), wire.data());
      ASSERT_TRUE(CheckWire(spec, wire, g.size()).ok()) << c.one;
      backend->Decode(spec, wire.data(), {d.data(), d.size()});
      const int head = Get<uint16_t>(wire.data(), 0);
      if (c.head >= 0) {
        EXPECT_EQ(head, c.head) << c.all << " " << c.one;
      }
      for (size_t i = 0; i < kTransform; ++i) {
        ASSERT_EQ(std::isfinite(d[i]), c.decoded) << c.all << " " << c.one << " " << i;
        if (!c.decoded) {
          ASSERT_EQ(r[i], i == 10 ? 1e-33f : 0.0f) << "a block that is not finite was kept";
        } else if (head == 0) {
          ASSERT_EQ(BitsOf(d[i]), 0u) << "exactly +0";
          ASSERT_EQ(r[i], g[i]);
        } else {
          const double scale = std::fabs(double{g[i]}) + std::fabs(double{d[i]});
          ASSERT_NEAR(double{d[i]} + double{r[i]}, double{g[i]}, 1e-6 * scale);
        }
      }
    }
  }
}

// A decoder that is given malformed bytes stays within its buffers: the address sanitizer checks
// that. Both backends decode them to the same values.
TEST(Adaptive, AnyBytesDecodeWithinTheirBounds) {
  std::mt19937_64 random(kSeed);
  for (const char* text : {"adaptive", "adaptive:bits=0.5", "adaptive:bits=2,floor=2"}) {
    const CodecSpec spec = Spec(text);
    for (int round = 0; round < 200; ++round) {
      const size_t numel = 1 + random() % 3000;
      std::vector<uint8_t> wire(EncodedBytes(spec, numel));
      for (uint8_t& byte : wire) byte = static_cast<uint8_t>(random());
      if (round % 3 == 0) std::fill_n(wire.begin(), 16, uint8_t{0x7f});
      std::vector<float> fast(numel), slow(numel);
      CpuBackend().Decode(spec, wire.data(), {fast.data(), numel});
      ScalarBackend().Decode(spec, wire.data(), {slow.data(), numel});
      for (size_t i = 0; i < numel; ++i) {
        const bool same = BitsOf(fast[i]) == BitsOf(slow[i]);
        ASSERT_TRUE(same || (std::isnan(fast[i]) && std::isnan(slow[i]))) << text << " " << i;
      }
    }
  }
}

TEST(Adaptive, MalformedShardsAreRefused) {
  const CodecSpec spec = Spec("adaptive");
  const size_t numel = 4 * kTransform;
  const std::vector<uint8_t> good = Encode(spec, Layers(4, kSeed));
  ASSERT_TRUE(CheckWire(spec, good, numel).ok());
  for (const uint16_t head : {uint16_t{1}, uint16_t{kFirstHead - 1}, uint16_t{kHugeHead + 1},
                              uint16_t{0x7f80}, uint16_t{0x7fc1}, uint16_t{0xbf80}}) {
    std::vector<uint8_t> bad = good;
    Put(bad.data(), 2, head);
    const absl::Status status = CheckWire(spec, bad, numel);
    EXPECT_NE(status.message().find("head of adaptive block 2"), absl::string_view::npos) << status;
  }
  // Blocks that are all zero have no codes.
  std::vector<uint8_t> bad(EncodedBytes(spec, numel), 0);
  ASSERT_TRUE(CheckWire(spec, bad, numel).ok());
  bad.back() = 1;
  const absl::Status status = CheckWire(spec, bad, numel);
  EXPECT_NE(status.message().find("add up to 0 bytes"), absl::string_view::npos) << status;
}

// Lloyd's condition: each level is the mean of the values nearest to it, up to rounding.
TEST(Adaptive, LevelsAreThoseOfAGaussian) {
  const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); };
  const auto above = [](double x) { return std::erfc(x / std::sqrt(2.0)) / 2; };
  for (int width = 1; width <= kMaxWidth; ++width) {
    const size_t count = size_t{1} << (width - 1);
    const uint16_t* const levels = kAdaptiveLevels + count - 1;
    const double unit = LevelUnits(width);
    for (size_t i = 0; i < count; ++i) {
      const double low = i == 0 ? 0 : (levels[i - 1] + levels[i]) / 2.0 / unit;
      const double high = i + 1 == count ? 40 : (levels[i] + levels[i + 1]) / 2.0 / unit;
      const double mean = (density(low) - density(high)) / (above(low) - above(high));
      EXPECT_NEAR(levels[i] / unit, mean, 0.8 / unit) << "width " << width << ", level " << i;
    }
  }
}

}  // namespace
}  // namespace thinwire
