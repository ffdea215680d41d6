// Tests which tensors are exchanged at once, raw or encoded, and which go in chunks.
#include <gtest/gtest.h>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

constexpr size_t kKiB = 1024;

class DirectTest : public testing::Test {
 protected:
  DirectExchange Of(size_t bytes, int world) const {
    const std::vector<Segment> all = {{.name = "g", .count = bytes / 4, .total = bytes / 4}};
    return DirectExchangeOf(all, DType::kF32, world, options_);
  }
  const Algorithm* AlgorithmOf(size_t bytes, int world) const { return Of(bytes, world).algorithm; }
  void Use(const char* codec) { options_.codecs = {*CodecPair::Parse(codec)}; }

  Options options_ = [] {
    Options options;
    options.codecs = {*CodecPair::Parse("int4")};
    return options;
  }();
};

TEST_F(DirectTest, RawUpToMinBytesOverAllPeers) {
  EXPECT_EQ(AlgorithmOf(64 * kKiB, 2), &Raw());
  EXPECT_EQ(AlgorithmOf(64 * kKiB + 4, 2), &OneHop());
  EXPECT_EQ(AlgorithmOf(32 * kKiB, 3), &Raw());
  EXPECT_EQ(AlgorithmOf(64 * kKiB, 3), &OneHop());
  EXPECT_EQ(Of(20 * kKiB, 3).bytes, 40 * kKiB);
}

TEST_F(DirectTest, EncodedUpToOneHopBytes) {
  EXPECT_EQ(AlgorithmOf(4000 * kKiB, 2), &OneHop());  // 508 KiB
  EXPECT_EQ(Of(4000 * kKiB, 2).bytes, EncodedBytes(options_.codecs[0].up, 1000 * kKiB));
  EXPECT_EQ(AlgorithmOf(4096 * kKiB, 2), nullptr);
  Use("bf16");
  EXPECT_EQ(AlgorithmOf(1024 * kKiB, 2), &OneHop());
  EXPECT_EQ(AlgorithmOf(1025 * kKiB, 2), nullptr);
  Use("onebit");  // 140 KiB, but larger than a chunk
  EXPECT_EQ(AlgorithmOf(4200 * kKiB, 2), nullptr);
}

// One hop costs (n - 2) / n more bytes than two hops; at most min_bytes more are allowed.
TEST_F(DirectTest, AmongManyOnlyWhatCostsFewMoreBytes) {
  EXPECT_EQ(AlgorithmOf(330 * kKiB, 4), &OneHop());  // 3 * 42 KiB; two hops send half of that
  EXPECT_EQ(AlgorithmOf(350 * kKiB, 4), nullptr);
  EXPECT_EQ(AlgorithmOf(8 * kKiB, 64), &OneHop());
  EXPECT_EQ(AlgorithmOf(9 * kKiB, 64), nullptr);
}

TEST_F(DirectTest, InOrderWhereTheOrderMatters) {
  options_.policy = Policy::kP3;
  EXPECT_EQ(AlgorithmOf(64 * kKiB, 2), &Raw());
  EXPECT_EQ(AlgorithmOf(500 * kKiB, 2), &OneHop());  // no more bytes than a raw tensor may have
  EXPECT_EQ(AlgorithmOf(520 * kKiB, 2), nullptr);
}

TEST_F(DirectTest, NothingWithoutMinBytes) {
  options_.min_bytes = 0;
  EXPECT_EQ(AlgorithmOf(4, 2), nullptr);
}

// Entries go to every rank in any case.
TEST_F(DirectTest, EntriesWithoutMoreBytes) {
  Use("topk:density=0.01");
  EXPECT_EQ(AlgorithmOf(3000 * kKiB, 2), &Entries());
  EXPECT_EQ(AlgorithmOf(3000 * kKiB, 8), &Entries());  // 7 * 31 KiB
  EXPECT_EQ(AlgorithmOf(4000 * kKiB, 16), nullptr);    // 15 * 41 KiB
  EXPECT_EQ(AlgorithmOf(64 * kKiB, 2), &Raw());
}

TEST_F(DirectTest, OneCodecAlone) {
  options_.codecs.push_back(*CodecPair::Parse("int8"));
  const std::vector<Segment> mixed = {{"a", 0, 30000, 30000, 0}, {"b", 0, 30000, 30000, 1}};
  EXPECT_EQ(DirectExchangeOf(mixed, DType::kF32, 2, options_).algorithm, nullptr);
  const std::vector<Segment> same = {{"a", 0, 30000, 30000, 1}, {"b", 0, 30000, 30000, 1}};
  const DirectExchange direct = DirectExchangeOf(same, DType::kF32, 2, options_);
  EXPECT_EQ(direct.algorithm, &OneHop());
  EXPECT_EQ(direct.bytes, EncodedBytes(options_.codecs[1].up, 60000));
}

}  // namespace
}  // namespace thinwire
