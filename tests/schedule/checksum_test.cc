// Damaged bytes between ranks: with checksums every rank gets a typed error, whichever way a tensor
// takes; without them the result is wrong and nobody notices.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/schedule/ranks.h"
#include "tests/transport/damaged_plane.h"

namespace thinwire {
namespace {

constexpr int kWorld = 3, kVictim = 1;

// Transports in which rank kVictim receives a wrong bit in its exchange number `at`, from 0.
std::vector<Transport> Damaged(Wire wire, int at) {
  std::vector<Transport> transports = Connect(wire, kWorld);
  std::unique_ptr<DataPlane>& plane = transports[kVictim].data;
  plane = std::make_unique<DamagedPlane>(std::move(plane), FlippedBit(2, at));
  return transports;
}

struct Way {
  const char* name;
  size_t numel;
  int exchanges;  // exchanges that may be damaged
};

class ChecksumTest : public testing::TestWithParam<Wire> {};
INSTANTIATE_TEST_SUITE_P(All, ChecksumTest, testing::Values(Wire::kInProcess, Wire::kGloo),
                         [](const auto& info) {
                           return info.param == Wire::kGloo ? "Gloo" : "InProcess";
                         });

// Raw in one exchange, encoded in one exchange, and by chunks in two hops, each damaged in turn.
TEST_P(ChecksumTest, DamageIsNamedOnEveryRank) {
  Options options;
  options.chunk_bytes = 64 << 10;
  options.checksum = true;
  options.timeout = std::chrono::seconds(20);
  for (const Way& way :
       {Way{"raw", 1000, 1}, Way{"direct", 60'000, 1}, Way{"chunks", 1 << 20, 4}}) {
    for (int hit = 0; hit < way.exchanges; ++hit) {
      SCOPED_TRACE(std::string(way.name) + " " + std::to_string(hit));
      RunRanks(Damaged(GetParam(), hit), options, [&](int rank, Engine& engine) {
        std::vector<float> values(way.numel, 1.0f);
        absl::Status status = AllReduce(engine, values, way.name);
        if (rank == kVictim) {
          EXPECT_FALSE(status.ok());
        }
        // The other ranks may have the right result already; their next call fails.
        if (status.ok()) status = AllReduce(engine, values, way.name);
        EXPECT_TRUE(absl::IsDataLoss(status)) << rank << ": " << status;
        for (const std::string& part : {std::string("what rank 2 sent to rank 1 came damaged"),
                                        "tensor '" + std::string(way.name) + "'"}) {
          EXPECT_NE(status.message().find(part), absl::string_view::npos) << status;
        }
      });
    }
  }
}

TEST_P(ChecksumTest, ResultsAreTheSameWithAndWithout) {
  for (const char* codec : {"fp32", "int4", "topk:density=0.05"}) {
    std::vector<float> results[2];
    for (const bool checksum : {false, true}) {
      Options options = SmallChunks(codec);
      options.checksum = checksum;
      RunRanks(GetParam(), kWorld, options, [&](int rank, Engine& engine) {
        std::vector<float> values;
        for (int step = 0; step < 3; ++step) {
          values = Gradient(10'000, 7, rank, step);
          ASSERT_TRUE(AllReduce(engine, values, "g").ok());
        }
        if (rank == 0) results[checksum] = values;
      });
    }
    EXPECT_EQ(results[0], results[1]) << codec;
  }
}

// Without checksums the damage goes unnoticed.
TEST_P(ChecksumTest, WithoutItTheResultIsWrong) {
  Options options = SmallChunks("fp32");
  RunRanks(Damaged(GetParam(), 0), options, [](int rank, Engine& engine) {
    std::vector<float> values(1000, 1.0f);
    const absl::Status status = AllReduce(engine, values, "g");
    EXPECT_TRUE(status.ok()) << status;
    if (rank == kVictim) {
      EXPECT_NE(values, std::vector<float>(1000, 1.0f));
    }
  });
}

}  // namespace
}  // namespace thinwire
