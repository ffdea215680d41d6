// The two-level allreduce: the shape of the grid, and in the engine the reference's bits.
#include <algorithm>

#include "schedule/collective/partition.h"
#include "tests/effort.h"
#include "tests/schedule/nonfinite.h"
#include "tests/schedule/ranks.h"
#include "tests/schedule/reference_bits.h"

namespace thinwire {
namespace {

Options InAGrid(const std::string& codec) {
  Options options = SmallChunks(codec);
  options.topology = Topology::kGrid;
  return options;
}

TEST(Grid, IsTheNearestToASquare) {
  const std::vector<std::tuple<int, int, int>> shapes = {
      {2, 1, 2}, {4, 2, 2}, {6, 2, 3}, {7, 1, 7}, {12, 3, 4}, {16, 4, 4}, {1000, 25, 40}};
  for (const auto& [world, rows, columns] : shapes) {
    EXPECT_EQ(GridOf(world).rows, rows) << world;
    EXPECT_EQ(GridOf(world).columns, columns) << world;
  }
}

TEST(Grid, IsTakenByLargeWorldsThatHaveAGoodOne) {
  Options options;
  EXPECT_FALSE(GoesByGrid(kGridFrom - 4, options));
  for (const int world : {64, 96, 100, 1000, 1024, 4096}) {
    EXPECT_TRUE(GoesByGrid(world, options)) << world;
  }
  EXPECT_FALSE(GoesByGrid(1021, options)) << "a prime";
  EXPECT_FALSE(GoesByGrid(2 * 509, options)) << "half of the messages, and one more rounding";
  options.topology = Topology::kFlat;
  EXPECT_FALSE(GoesByGrid(1024, options));
  options.topology = Topology::kGrid;
  EXPECT_TRUE(GoesByGrid(4, options));
  EXPECT_FALSE(GoesByGrid(3, options)) << "one row is no grid";
}

// Every element has one owner, and each shard consists of whole blocks of its column's part.
TEST(Grid, ShardsHaveOneOwnerEach) {
  for (const int world : {4, 6, 9, 12, 16}) {
    const std::vector<Segment> all = {{.name = "g", .count = 50000, .total = 50000}};
    const Partition partition = MakePartition(all, world, InAGrid("int4"));
    const Grid grid = GridOf(world);
    std::vector<int> owners(50000);
    for (int rank = 0; rank < world; ++rank) {
      for (const Range& owned : partition.SecondHopOf(rank)) {
        for (size_t i = owned.begin; i < owned.end; ++i) ++owners[i];
      }
      for (const Chunk& chunk : partition.chunks) {
        ASSERT_EQ(chunk.algorithm, &TwoLevel());
        const Range shard = TwoLevel().second_hop(chunk, rank);
        const Range part = grid.part(chunk, grid.column(rank));
        EXPECT_TRUE(part.begin <= shard.begin && shard.end <= part.end) << rank;
      }
    }
    EXPECT_EQ(owners, std::vector<int>(50000, 1)) << world;
  }
}

TEST(TwoLevel, GivesTheReferencesBitsOnEveryRankOverManySteps) {
  const std::vector<int> worlds =
      kSanitized ? std::vector<int>{6} : std::vector<int>{4, 6, 9, 12, 16};
  for (const int world : worlds) {
    for (const char* codec : {"fp32", "int4", "onebit:down=onebit", "int8:rounding=stochastic",
                              "int8:block=128,down=int4:block=512"}) {
      ExpectTheReferencesBits(Wire::kInProcess, world, InAGrid(codec), 5003, 5);
    }
  }
}

TEST(TwoLevel, GivesTheReferencesBitsOverGloo) {
  for (const int world : {4, 6}) {
    ExpectTheReferencesBits(Wire::kGloo, world, InAGrid("int4"), 5003, 5);
  }
}

TEST(TwoLevel, GivesTheReferencesBitsWithMomentum) {
  Options options = InAGrid("onebit");
  options.momentum = {.beta = 0.9f, .nesterov = true};
  ExpectTheReferencesBits(Wire::kInProcess, 6, options, 5003, 5);
}

TEST(TwoLevel, GivesTheReferencesBitsWithHeadsOfGroups) {
  Options options = InAGrid("int4");
  options.control_tree_from = 2;
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    ExpectTheReferencesBits(wire, 6, options, 5003, 5);
  }
}

// Chunks with fewer blocks than ranks leave some ranks without a shard.
TEST(TwoLevel, TakesTensorsOfAnySize) {
  for (const size_t numel : {1, 255, 257, 700, 1025}) {
    ExpectTheReferencesBits(Wire::kInProcess, 6, InAGrid("int4"), numel, 2);
  }
}

// 16-bit inputs are summed in fp32: 1 + 2^-9 would be 1 in bf16.
TEST(TwoLevel, SumsSixteenBitsInFp32) {
  constexpr size_t kNumel = 1000;
  RunRanks(Wire::kInProcess, 4, InAGrid("fp32"), [&](int rank, Engine& engine) {
    std::vector<float> values(kNumel, rank == 0 ? 1.0f : 0x1p-9f);
    std::vector<uint8_t> bytes(kNumel * 2), wire(EncodedBytes(Spec("fp32"), kNumel));
    const TensorView view{bytes.data(), kNumel, DType::kBF16};
    ScalarBackend().Encode(Spec("fp32"), View(values), nullptr, wire.data());
    ScalarBackend().Decode(Spec("fp32"), wire.data(), view);
    auto work = engine.Start({.input = view, .output = view, .op = Op::kSum});
    ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
    ScalarBackend().Encode(Spec("fp32"), view, nullptr, wire.data());
    ScalarBackend().Decode(Spec("fp32"), wire.data(), View(values));
    // 1 + 3 * 2^-9 lies between 1 and 1 + 2^-7, and nearer to the latter.
    for (const float value : values) ASSERT_EQ(value, 1.0f + 0x1p-7f);
  });
}

// A NaN or Inf becomes NaN in its block on every rank, and leaves no trace in later steps.
TEST(TwoLevel, NonFiniteValuesReachEveryRankAndLeaveNoTrace) {
  ExpectNonFiniteLeavesNoTrace(6, InAGrid("int4"));
}

}  // namespace
}  // namespace thinwire
