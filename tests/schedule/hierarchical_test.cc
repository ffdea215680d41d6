// The hierarchical allreduce: the shape of nodes, the reference's bits in the engine, and residuals
// from other layouts and worlds.
#include <mutex>

#include "schedule/collective/partition.h"
#include "tests/effort.h"
#include "tests/schedule/nonfinite.h"
#include "tests/schedule/reference_bits.h"
#include "tests/transport/connect_gloo.h"
#include "tests/transport/connect_ucx.h"
#include "transport/combined/combined.h"

namespace thinwire {
namespace {

struct Shape {
  int nodes, local_size;
  int world() const { return nodes * local_size; }
};
constexpr Shape kShapes[] = {{2, 2}, {3, 2}, {2, 4}};

Options ByNodes(const std::string& codec, int local_size) {
  Options options = SmallChunks(codec);
  options.topology = Topology::kHierarchical;
  options.local_size = local_size;
  return options;
}

TEST(Hierarchy, NeedsSeveralNodesOfSeveralRanks) {
  EXPECT_TRUE(GoesByNodes(4, ByNodes("int4", 2)));
  EXPECT_FALSE(GoesByNodes(4, ByNodes("int4", 4))) << "one node";
  EXPECT_FALSE(GoesByNodes(4, ByNodes("int4", 1))) << "nodes of one";
  EXPECT_FALSE(GoesByNodes(5, ByNodes("int4", 2))) << "uneven nodes";
  EXPECT_FALSE(GoesByNodes(64, ByNodes("int4", 0))) << "nobody has said or found what a node is";
  EXPECT_EQ(GridFor(64, ByNodes("int4", 0)).rows, 1) << "which goes flat, not by a square grid";
}

// Every element has one owner; all elements outside a rank's own shard are of its first hop.
TEST(Hierarchy, ShardsHaveOneOwnerEach) {
  constexpr size_t kNumel = 50000;
  const std::vector<Segment> all = {{.name = "g", .count = kNumel, .total = kNumel}};
  for (const Shape& shape : kShapes) {
    const Partition partition =
        MakePartition(all, shape.world(), ByNodes("int4", shape.local_size));
    std::vector<int> owners(kNumel);
    for (int rank = 0; rank < shape.world(); ++rank) {
      for (const Range& owned : partition.SecondHopOf(rank)) {
        for (size_t i = owned.begin; i < owned.end; ++i) ++owners[i];
      }
    }
    for (const Chunk& chunk : partition.chunks) ASSERT_EQ(chunk.algorithm, &Hierarchical());
    EXPECT_EQ(owners, std::vector<int>(kNumel, 1)) << shape.nodes << "x" << shape.local_size;
  }
  EXPECT_NE(MakePartition(all, 8, ByNodes("int4", 2)).Hash(),
            MakePartition(all, 8, ByNodes("int4", 4)).Hash());
}

TEST(Hierarchical, GivesTheReferencesBitsWithEveryCodec) {
  for (const Shape& shape : kShapes) {
    if (kSanitized && shape.nodes != 3) continue;
    for (const char* codec :
         {"fp32", "int4", "onebit:down=onebit", "int8:rounding=stochastic", "topk"}) {
      ExpectTheReferencesBits(Wire::kInProcess, shape.world(), ByNodes(codec, shape.local_size),
                              5003, 3);
    }
  }
}

TEST(Hierarchical, GivesTheReferencesBitsOver200Steps) {
  for (const Shape& shape : kShapes) {
    ExpectTheReferencesBits(Wire::kInProcess, shape.world(), ByNodes("int4", shape.local_size),
                            2003, kSanitized ? 20 : 200);
  }
}

TEST(Hierarchical, GivesTheReferencesBitsOverGloo) {
  ExpectTheReferencesBits(Wire::kGloo, 4, ByNodes("int4", 2), 5003, 5);
}

// UCX inside nodes, Gloo between them.
TEST(Hierarchical, GivesTheReferencesBitsOverAPlaneOfItsOwnInsideNodes) {
  if (const absl::Status absent = IsHere(Wire::kUcx); !absent.ok()) GTEST_SKIP() << absent;
  constexpr int kWorld = 4, kLocalSize = 2;
  std::vector<Transport> transports = ConnectGlooRanks(kWorld);
  for (int first = 0; first < kWorld; first += kLocalSize) {
    std::vector<std::unique_ptr<DataPlane>> inside = ConnectUcxPlanes(kLocalSize);
    for (int i = 0; i < kLocalSize; ++i) {
      std::unique_ptr<DataPlane>& data = transports[first + i].data;
      data = std::make_unique<Split>(std::move(inside[i]), std::move(data));
    }
  }
  ExpectTheReferencesBits(std::move(transports), ByNodes("int4", kLocalSize), 50003, 5);
}

TEST(Hierarchical, GivesTheReferencesBitsWithMomentum) {
  Options options = ByNodes("onebit", 2);
  options.momentum = {.beta = 0.9f, .nesterov = true};
  ExpectTheReferencesBits(Wire::kInProcess, 4, options, 5003, 5);
}

// Chunks with fewer blocks than ranks leave some ranks without a shard.
TEST(Hierarchical, TakesTensorsOfAnySize) {
  for (const size_t numel : {1, 255, 257, 700, 1025}) {
    ExpectTheReferencesBits(Wire::kInProcess, 6, ByNodes("int4", 2), numel, 2);
  }
}

TEST(Hierarchical, NonFiniteValuesReachEveryRankAndLeaveNoTrace) {
  ExpectNonFiniteLeavesNoTrace(6, ByNodes("int4", 2));
}

// The sums of the gradients and the results of a parameter, and its residuals at the end.
struct Books {
  explicit Books(size_t numel) : given(numel), sent(numel), kept(numel) {}
  std::mutex mu;
  std::vector<double> given, sent, kept;
};

// Runs steps in a world whose first ranks have the residuals `before`. Returns residuals by rank.
std::vector<ParameterResidual> Train(int world, const Options& options, DType dtype,
                                     const std::vector<ParameterResidual>& before, Books& books) {
  constexpr int kSteps = 10;
  const size_t numel = books.given.size();
  std::vector<ParameterResidual> after(world);
  const CodecSpec plain = LosslessSpec(DType::kF32);
  RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
    if (rank < static_cast<int>(before.size())) {
      ASSERT_TRUE(engine.error_feedback().Import("g", before[rank]).ok());
    }
    for (int step = 0; step < kSteps; ++step) {
      std::vector<float> values = Gradient(numel, world, rank, step);
      std::vector<uint8_t> bytes(numel * SizeOf(dtype)), wire(EncodedBytes(plain, numel));
      const TensorView view{bytes.data(), numel, dtype};
      const auto convert = [&](TensorView from, TensorView to) {
        ScalarBackend().Encode(plain, from, nullptr, wire.data());
        ScalarBackend().Decode(plain, wire.data(), to);
      };
      convert(View(values), view);
      convert(view, View(values));  // rounded to the dtype
      {
        const std::lock_guard lock(books.mu);
        for (size_t i = 0; i < numel; ++i) books.given[i] += values[i];
      }
      auto work = engine.Start({.input = view, .output = view, .key = "g", .op = Op::kSum});
      ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
      if (rank != 0) continue;
      convert(view, View(values));
      for (size_t i = 0; i < numel; ++i) books.sent[i] += values[i];
    }
    ASSERT_TRUE(engine.error_feedback().Export("g", &after[rank]).ok());
  });
  return after;
}

// Residuals of fp32 elements outside a rank's own column's part must all have been sent.
void ExpectNothingKeptForOtherColumns(const std::vector<ParameterResidual>& kept,
                                      const Options& options) {
  const int world = static_cast<int>(kept.size());
  const size_t numel = kept[0].first.size();
  const std::vector<Segment> all = {{.name = "g", .count = numel, .total = numel}};
  for (const Chunk& chunk : MakePartition(all, world, options).chunks) {
    const Grid grid = GridOf(chunk);
    for (int rank = 0; rank < world; ++rank) {
      const Range part = grid.part(chunk, grid.column(rank));
      for (size_t i = chunk.elements.begin; i < chunk.elements.end; ++i) {
        if (part.begin <= i && i < part.end) continue;
        ASSERT_EQ(kept[rank].first[i], 0.0f) << "rank " << rank << ", element " << i;
      }
    }
  }
}

// A rank's residuals may be large if they come from a flat world, where all elements are encoded.
// They are sent inside the node, also for 16-bit elements.
TEST(Hierarchical, LosesNothingOfWhatOtherLayoutsAndWorldsHaveKept) {
  constexpr size_t kNumel = 3001;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Options flat = SmallChunks("onebit:down=onebit");
    flat.topology = Topology::kFlat;
    const Options by_nodes = ByNodes("onebit:down=onebit", 2);
    Books books(kNumel);
    std::vector<ParameterResidual> kept = Train(4, flat, dtype, {}, books);
    kept = Train(4, by_nodes, dtype, kept, books);
    if (dtype == DType::kF32) ExpectNothingKeptForOtherColumns(kept, by_nodes);
    kept = Train(6, by_nodes, dtype, kept, books);
    kept = Train(8, ByNodes("onebit:down=onebit", 4), dtype, kept, books);
    kept = Train(8, flat, dtype, kept, books);
    for (const ParameterResidual& residual : kept) {
      for (size_t i = 0; i < kNumel; ++i) {
        books.kept[i] += residual.first[i] + double{residual.second[i]};
      }
    }
    // 16-bit results are rounded once more after `sent` was computed.
    const double tolerance = dtype == DType::kF32 ? 2e-6 : 2e-3;
    for (size_t i = 0; i < kNumel; ++i) {
      ASSERT_NEAR(books.sent[i] + books.kept[i], books.given[i], tolerance) << i;
    }
  }
}

// Residuals of other columns' parts are sent whenever they appear: also after steps that found
// none, and after a step in which the parameter was absent.
TEST(Hierarchical, TakesAlongResidualsThatComeLater) {
  constexpr int kWorld = 4;
  constexpr size_t kNumel = 3001;
  const Options options = ByNodes("onebit:down=onebit", 2);
  for (const bool stands_aside : {false, true}) {
    std::vector<ParameterResidual> kept(kWorld);
    RunRanks(Wire::kInProcess, kWorld, options, [&](int rank, Engine& engine) {
      const uint32_t number = 0;
      const auto step = [&](std::span<const uint32_t> absent) {
        std::vector<float> values(kNumel, absent.empty() ? 1.0f : 0.0f);
        auto work = engine.Start(
            {.input = View(values), .output = View(values), .key = "g", .absent = absent});
        ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
      };
      for (int i = 0; i < 3; ++i) step({});
      ParameterResidual more;
      ASSERT_TRUE(engine.error_feedback().Export("g", &more).ok());
      for (float& value : more.first) value += 0.5f;
      ASSERT_TRUE(engine.error_feedback().Import("g", more).ok());
      if (stands_aside) step({&number, 1});
      step({});
      ASSERT_TRUE(engine.error_feedback().Export("g", &kept[rank]).ok());
    });
    ExpectNothingKeptForOtherColumns(kept, options);
  }
}

}  // namespace
}  // namespace thinwire
