// The mean of several members' shards and its products have the same bits on every instruction set:
// those of the header's rule, which is repeated here.
#include "compress/weighted_mean.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "tests/compress/target_test.h"
#include "tests/compress/values.h"

namespace thinwire {
namespace {

// Returns the product of two arrays, lane by lane.
double ProductOf(const float* a, const float* b, size_t n) {
  double product = 0;
  for (size_t begin = 0; begin < n; begin += kProductPiece) {
    std::array<double, kProductLanes> lane{};
    for (size_t i = begin; i < std::min(n, begin + kProductPiece); ++i) {
      lane[i % kProductLanes] += double{a[i]} * double{b[i]};
    }
    for (size_t half = kProductLanes / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    product += lane[0];
  }
  return product;
}

struct Case {
  CodecSpec spec;
  size_t members, numel, shard;
};

struct Members {
  explicit Members(const Case& test) {
    for (size_t m = 0; m < test.members; ++m) {
      std::vector<float> x = Normal(test.numel, kSeed + m);
      std::vector<uint8_t> wire(ShardsBytes(test.spec, test.numel, test.shard));
      values.emplace_back(test.numel);
      size_t at = 0;
      for (size_t begin = 0; begin < test.numel; begin += test.shard) {
        const size_t count = std::min(test.shard, test.numel - begin);
        ScalarBackend().Encode(test.spec, {x.data() + begin, count}, nullptr, wire.data() + at);
        ScalarBackend().Decode(test.spec, wire.data() + at, {values[m].data() + begin, count});
        at += EncodedBytes(test.spec, count);
      }
      EXPECT_EQ(at, wire.size());
      wires.push_back(std::move(wire));
      factors.push_back(1.0f / static_cast<float>(m + 3));
    }
    for (const std::vector<uint8_t>& wire : wires) pointers.push_back(wire.data());
  }

  static std::vector<float> Normal(size_t numel, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0f, 1e-3f);
    std::vector<float> values(numel);
    for (float& value : values) value = normal(random);
    return values;
  }

  std::vector<std::vector<float>> values;
  std::vector<std::vector<uint8_t>> wires;
  std::vector<const uint8_t*> pointers;
  std::vector<float> factors;
};

void Check(const Case& test) {
  const Members members(test);
  std::vector<float> mean(test.numel), want(test.numel);
  std::vector<double> products(2 * test.members + 1, 0.5), sums = products;
  ASSERT_TRUE(WeightedMean({.spec = test.spec,
                            .wires = members.pointers,
                            .factors = members.factors,
                            .shard = test.shard,
                            .mean = mean,
                            .products = products})
                  .ok());
  for (size_t i = 0; i < test.numel; ++i) {
    want[i] = members.values[0][i] * members.factors[0];
    for (size_t m = 1; m < test.members; ++m) {
      const float product = members.values[m][i] * members.factors[m];
      want[i] = want[i] + product;
    }
  }
  const std::string what = test.spec.ToString() + ", " + std::to_string(test.members) +
                           " members, " + std::to_string(test.numel) + " in shards of " +
                           std::to_string(test.shard);
  ASSERT_TRUE(SameBits(mean.data(), want.data(), 4 * test.numel)) << what;
  // The pieces of a shard are added one after another.
  for (size_t begin = 0; begin < test.numel; begin += test.shard) {
    const size_t end = std::min(test.numel, begin + test.shard);
    for (size_t at = begin; at < end; at += kProductPiece) {
      const size_t count = std::min(kProductPiece, end - at);
      for (size_t m = 0; m < test.members; ++m) {
        const float* const x = members.values[m].data() + at;
        sums[m] += ProductOf(x, x, count);
        sums[test.members + m] += ProductOf(x, want.data() + at, count);
      }
      sums[2 * test.members] += ProductOf(want.data() + at, want.data() + at, count);
    }
  }
  ASSERT_EQ(products, sums) << what;
}

class WeightedMeanTest : public TargetTest {};

TEST_P(WeightedMeanTest, HasTheBitsOfItsRule) {
  for (const char* const spec : {"fp32", "bf16", "int8", "int4", "onebit", "adaptive",
                                 "adaptive:bits=0.5", "ternary", "topk:density=0.05"}) {
    for (const size_t members : {1, 2, 3, 9}) {
      for (const size_t numel : {1, 15, 16, 255, 4096, 5000, 9001}) {
        Check({Spec(spec), members, numel, 4352});
      }
    }
  }
}

TEST_P(WeightedMeanTest, ProductsThatAreNotFiniteAreNotHidden) {
  const CodecSpec spec = Spec("fp32");
  std::vector<float> x(100, 1.0f), mean(100);
  x[17] = INFINITY;
  std::vector<uint8_t> wire(EncodedBytes(spec, x.size()));
  ScalarBackend().Encode(spec, {x.data(), x.size()}, nullptr, wire.data());
  const uint8_t* const wires[] = {wire.data()};
  const float factors[] = {1.0f};
  double products[3] = {};
  ASSERT_TRUE(WeightedMean({spec, wires, factors, 100, mean, products}).ok());
  for (const double product : products) EXPECT_FALSE(std::isfinite(product));
}

TEST_P(WeightedMeanTest, AMalformedShardIsRefused) {
  const CodecSpec spec = Spec("topk:density=0.05");
  const Members members({spec, 2, 3000, 3000});
  std::vector<uint8_t> bad = members.wires[1];
  bad[0] ^= 1;  // the count of the first entries
  const uint8_t* const wires[] = {members.wires[0].data(), bad.data()};
  std::vector<float> mean(3000);
  double products[5] = {};
  EXPECT_EQ(WeightedMean({spec, wires, members.factors, 3000, mean, products}).code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Targets, WeightedMeanTest, testing::ValuesIn(SimdTargets()));

}  // namespace
}  // namespace thinwire
