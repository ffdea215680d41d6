// Stochastic rounding is unbiased and depends on logical elements only; the transform and onebit
// have the errors that theory predicts.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "compress/backend.h"
#include "compress/codec_list.h"

namespace thinwire {
namespace {

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

std::vector<float> RoundTrip(const CodecSpec& spec, std::vector<float> x, const Draws& draws = {}) {
  std::vector<uint8_t> wire(EncodedBytes(spec, x.size()));
  CpuBackend().Encode(spec, {x.data(), x.size()}, nullptr, wire.data(), draws);
  std::vector<float> decoded(x.size());
  CpuBackend().Decode(spec, wire.data(), {decoded.data(), x.size()});
  return decoded;
}

std::vector<float> Normal(size_t numel) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

double RelativeError(const std::string& text, const std::vector<float>& x) {
  const std::vector<float> decoded = RoundTrip(Spec(text), x);
  double error = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += std::pow(double{x[i]} - decoded[i], 2);
    norm += std::pow(double{x[i]}, 2);
  }
  return error / norm;
}

// Known answers of the generator's authors: Random123, kat_vectors, philox4x32 10.
TEST(Philox, KnownAnswers) {
  const Philox4 zero = Philox({{0, 0, 0, 0}}, 0);
  EXPECT_EQ(zero.word[0], 0x6627e8d5u);
  EXPECT_EQ(zero.word[1], 0xe169c58du);
  EXPECT_EQ(zero.word[2], 0xbc57ac4cu);
  EXPECT_EQ(zero.word[3], 0x9b00dbd8u);
  const uint32_t ones = 0xffffffffu;
  const Philox4 full = Philox({{ones, ones, ones, ones}}, ~uint64_t{0});
  EXPECT_EQ(full.word[0], 0x408f276du);
  EXPECT_EQ(full.word[3], 0x6d5451fdu);
}

// The mean of N draws is off by about 1 / sqrt(N): four times less with sixteen times the draws.
TEST(StochasticRounding, TheMeanConvergesToTheValue) {
  for (const char* name : {"int8", "int4"}) {
    const CodecSpec spec = Spec(std::string(name) + ":rounding=stochastic");
    const float qmax = static_cast<float>(spec.traits().qmax);
    for (const float fraction : {0.03f, 0.25f, 0.5f, 0.81f}) {
      // One element of each block sets the scale to 1; the others are the value under test.
      const auto mean_error = [&](size_t numel) {
        std::vector<float> x(numel, 2.0f + fraction);
        for (size_t i = 0; i < numel; i += 256) x[i] = qmax;
        const std::vector<float> decoded = RoundTrip(spec, x);
        double sum = 0;
        size_t count = 0;
        for (size_t i = 0; i < numel; ++i) {
          if (i % 256 == 0) continue;
          EXPECT_TRUE(decoded[i] == 2.0f || decoded[i] == 3.0f) << decoded[i];
          sum += double{decoded[i]} - x[i];
          ++count;
        }
        return std::abs(sum / static_cast<double>(count));
      };
      const double sigma = std::sqrt(fraction * (1 - fraction));
      for (const size_t numel : {size_t{1} << 14, size_t{1} << 18, size_t{1} << 22}) {
        EXPECT_LT(mean_error(numel), 4 * sigma / std::sqrt(double(numel))) << name << fraction;
      }
    }
  }
}

// The same element gets the same draw however the tensor is cut; another step gets other draws.
TEST(StochasticRounding, DependsOnTheElementNotOnTheCut) {
  const CodecSpec spec = Spec("int8:rounding=stochastic");
  const std::vector<float> x = Normal(10240);
  const Draws draws{.key = 42, .stream = 7, .first = 0};
  const std::vector<float> whole = RoundTrip(spec, x, draws);
  for (const size_t cut : {256, 1024, 5120}) {
    std::vector<float> pieces;
    for (size_t begin = 0; begin < x.size(); begin += cut) {
      const std::vector<float> part(x.begin() + begin, x.begin() + begin + cut);
      const std::vector<float> decoded = RoundTrip(spec, part, {42, 7, begin});
      pieces.insert(pieces.end(), decoded.begin(), decoded.end());
    }
    EXPECT_EQ(pieces, whole) << cut;
  }
  EXPECT_NE(RoundTrip(spec, x, {42, 8, 0}), whole);
  EXPECT_NE(RoundTrip(spec, x, {43, 7, 0}), whole);
}

TEST(Hadamard, HalvesTheErrorOfInt4OnGaussianNoise) {
  const std::vector<float> x = Normal(1 << 18);
  const double plain = RelativeError("int4", x), transformed = RelativeError("int4:hadamard=1", x);
  EXPECT_LT(transformed, 0.8 * plain);
  // A spike ruins its block for int4; the transform spreads it.
  std::vector<float> spiky = x;
  for (size_t i = 0; i < spiky.size(); i += 256) spiky[i] = 30.0f;
  EXPECT_LT(RelativeError("int4:hadamard=1", spiky), 0.25 * RelativeError("int4", spiky));
}

// With the optimal scale E|x| of the noise, error^2 = 1 - 2 / pi.
TEST(OneBit, ErrorOnGaussianNoise) {
  const double pi = std::acos(-1.0);
  EXPECT_NEAR(RelativeError("onebit:block=4096", Normal(1 << 20)), 1 - 2 / pi, 0.002);
}

}  // namespace
}  // namespace thinwire
