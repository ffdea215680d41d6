// The last use of every tensor can be undone: residuals and momentum then have the bits from before
// it, whether it was done or failed half-way.
#include <barrier>
#include <cstring>
#include <string>

#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

class UndoTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, UndoTest,
                         testing::Values("int8", "int4", "onebit", "topk:density=0.03",
                                         "int4:hadamard=1"),
                         [](const auto& info) {
                           std::string name = info.param;
                           return name.substr(0, name.find(':')) +
                                  (name.find("hadamard") == std::string::npos ? "" : "_hadamard");
                         });

constexpr size_t kNumel = 5000;

ParameterResidual Kept(Engine& engine) {
  ParameterResidual kept;
  EXPECT_TRUE(engine.error_feedback().Export("g", &kept).ok());
  return kept;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool Same(const ParameterResidual& a, const ParameterResidual& b) {
  return SameBits(a.first, b.first) && SameBits(a.second, b.second) &&
         SameBits(a.array(kMomentum), b.array(kMomentum));
}

absl::Status Step(Engine& engine, int rank, int step) {
  std::vector<float> values = Gradient(kNumel, 1, rank, step);
  return AllReduce(engine, values, "g");
}

Options Recoverable(const std::string& codec) {
  Options options = SmallChunks(codec);
  options.one_hop_bytes = 0;
  options.momentum.beta = 0.9f;
  options.recoverable = true;
  return options;
}

TEST_P(UndoTest, TakesBackAStepThatWasDone) {
  RunRanks(Wire::kInProcess, 3, Recoverable(GetParam()), [&](int rank, Engine& engine) {
    for (int step = 0; step < 3; ++step) ASSERT_TRUE(Step(engine, rank, step).ok());
    const ParameterResidual before = Kept(engine);
    ASSERT_TRUE(Step(engine, rank, 3).ok());
    EXPECT_FALSE(Same(Kept(engine), before)) << "the step changed nothing";
    ASSERT_TRUE(engine.error_feedback().Undo().ok());
    EXPECT_TRUE(Same(Kept(engine), before));
    ASSERT_TRUE(engine.error_feedback().Undo().ok());
    EXPECT_TRUE(Same(Kept(engine), before)) << "a second call does nothing";
  });
}

// A rank aborts when some chunks of the step are done and others are not.
TEST_P(UndoTest, TakesBackAStepThatFailedHalfWay) {
  std::barrier together(3);
  RunRanks(Wire::kInProcess, 3, Recoverable(GetParam()), [&](int rank, Engine& engine) {
    for (int step = 0; step < 3; ++step) EXPECT_TRUE(Step(engine, rank, step).ok());
    const ParameterResidual before = Kept(engine);
    together.arrive_and_wait();
    std::vector<float> values = Gradient(kNumel, 1, rank, 3);
    auto work = engine.Start({.input = View(values), .output = View(values), .key = "g"});
    if (!work.ok()) return;  // rank 1 was faster
    if (rank == 1) engine.Abort(absl::AbortedError("enough"));
    (*work)->Wait().IgnoreError();
    ASSERT_TRUE(engine.error_feedback().Undo().ok());
    EXPECT_TRUE(Same(Kept(engine), before));
  });
}

// A refused submission must not change the log of the step before, which is still the last one.
TEST(UndoLogTest, ARefusedSubmissionIsNoUse) {
  std::barrier together(2);
  RunRanks(Wire::kInProcess, 2, Recoverable("int4"), [&](int rank, Engine& engine) {
    EXPECT_TRUE(Step(engine, rank, 0).ok());
    const ParameterResidual before = Kept(engine);
    EXPECT_TRUE(Step(engine, rank, 1).ok());
    together.arrive_and_wait();
    engine.Abort(absl::AbortedError("enough"));
    EXPECT_FALSE(Step(engine, rank, 2).ok());
    ASSERT_TRUE(engine.error_feedback().Undo().ok());
    EXPECT_TRUE(Same(Kept(engine), before));
  });
}

// The halves of an allreduce keep residuals as well: a reduce-scatter for all parts of other ranks,
// an all-gather for the rank's own elements.
TEST_P(UndoTest, TakesBackAReduceScatterAndAnAllGather) {
  if (std::string(GetParam()).starts_with("topk")) GTEST_SKIP() << "has no such collectives";
  constexpr int kWorld = 3;
  Options options = Recoverable(GetParam());
  options.momentum = {};
  for (const Collective collective : {Collective::kReduceScatter, Collective::kAllGather}) {
    const bool scatters = collective == Collective::kReduceScatter;
    const size_t in = scatters ? kWorld * kNumel : kNumel;
    const size_t out = scatters ? kNumel : kWorld * kNumel;
    RunRanks(Wire::kInProcess, kWorld, options, [&](int rank, Engine& engine) {
      const auto step = [&](int number) {
        std::vector<float> input = Gradient(in, 1, rank, number), output(out);
        auto work = engine.Start(
            {.input = View(input), .output = View(output), .key = "g", .collective = collective});
        return work.ok() ? (*work)->Wait() : work.status();
      };
      for (int number = 0; number < 3; ++number) ASSERT_TRUE(step(number).ok()) << engine.status();
      const ParameterResidual before = Kept(engine);
      ASSERT_TRUE(step(3).ok()) << engine.status();
      EXPECT_FALSE(Same(Kept(engine), before)) << "the step changed nothing";
      ASSERT_TRUE(engine.error_feedback().Undo().ok());
      EXPECT_TRUE(Same(Kept(engine), before)) << (scatters ? "reduce-scatter" : "all-gather");
    });
  }
}

TEST(UndoLogTest, WithoutTheOptionNothingIsTakenBack) {
  Options options = Recoverable("int4");
  options.recoverable = false;
  RunRanks(Wire::kInProcess, 2, options, [&](int rank, Engine& engine) {
    ASSERT_TRUE(Step(engine, rank, 0).ok());
    const ParameterResidual after = Kept(engine);
    ASSERT_TRUE(engine.error_feedback().Undo().ok());
    EXPECT_TRUE(Same(Kept(engine), after));
  });
}

}  // namespace
}  // namespace thinwire
