// A parameter without a gradient counts as zeros, its residual and momentum wait, and nothing is
// lost. A call may set its own divisor: for weights, and for members that do not count.
#include <limits>
#include <mutex>

#include "schedule/collective/algorithm.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

constexpr int kWorld = 3;
constexpr size_t kA = 1500, kB = 2700, kC = 900;

// a, b and c in one bucket of several chunks, some of which hold parts of two of them. With two
// codecs the partition moves b behind the others.
std::vector<Segment> Segments(uint32_t codec_of_b) {
  return {{"a", 0, kA, kA, 0}, {"b", 0, kB, kB, codec_of_b}, {"c", 0, kC, kC, 0}};
}

// Reduces a step's gradients, without b's if it is absent on this rank.
std::vector<float> Reduce(Engine& engine, int rank, int step, bool absent,
                          const std::vector<Segment>& segments) {
  std::vector<float> values = Gradient(kA + kB + kC, 5, rank, step);
  if (absent) std::fill_n(values.begin() + kA, kB, 0.0f);
  const std::vector<uint32_t> numbers(absent ? 1 : 0, 1);
  auto work = engine.Start({.input = View(values),
                            .output = View(values),
                            .key = "bucket",
                            .segments = segments,
                            .absent = numbers});
  EXPECT_TRUE(work.ok()) << work.status();
  EXPECT_TRUE((*work)->Wait().ok());
  return values;
}

ParameterResidual Kept(Engine& engine, const char* name) {
  ParameterResidual kept;
  EXPECT_TRUE(engine.error_feedback().Export(name, &kept).ok());
  return kept;
}

struct Case {
  const char* codec;
  const char* codec_of_b = nullptr;
  float momentum = 0.0f;
  bool one_hop = false;
};

class AbsenceTest : public testing::TestWithParam<Case> {
 protected:
  Options MakeOptions() const {
    Options options = SmallChunks(GetParam().codec);
    if (GetParam().codec_of_b != nullptr) {
      options.codecs.push_back(*CodecPair::Parse(GetParam().codec_of_b));
    }
    options.momentum.beta = GetParam().momentum;
    if (GetParam().one_hop) {
      options.chunk_bytes = 1 << 20;
      options.min_bytes = 20000;  // too little to send the tensor raw
    }
    return options;
  }
  std::vector<Segment> MakeSegments() const {
    return Segments(GetParam().codec_of_b == nullptr ? 0 : 1);
  }
  bool sparse() const { return std::string_view(GetParam().codec).starts_with("topk"); }
};

INSTANTIATE_TEST_SUITE_P(ExactZeros, AbsenceTest,
                         testing::Values(Case{"int8"}, Case{"int4"}, Case{"topk:density=0.03"},
                                         Case{"int4", nullptr, 0.0f, true}, Case{"int8", "int4"},
                                         Case{"int4", "topk:density=0.03"},
                                         Case{"topk:density=0.03", nullptr, 0.9f}));

// If no rank has a gradient of a parameter, its state does not change.
TEST_P(AbsenceTest, WhatIsKeptWaits) {
  RunRanks(Wire::kInProcess, kWorld, MakeOptions(), [&](int rank, Engine& engine) {
    const std::vector<Segment> segments = MakeSegments();
    Reduce(engine, rank, 0, false, segments);
    const ParameterResidual before = Kept(engine, "b"), a = Kept(engine, "a");
    for (int step = 1; step < 4; ++step) Reduce(engine, rank, step, true, segments);
    EXPECT_EQ(Kept(engine, "b").first, before.first);
    if (sparse()) {
      EXPECT_EQ(Kept(engine, "b").arrays, before.arrays);
    }
    EXPECT_NE(Kept(engine, "a").first, a.first);  // the other parameters go on
    Reduce(engine, rank, 4, false, segments);
    EXPECT_NE(Kept(engine, "b").first, before.first);
  });
}

class AbsenceBooksTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, AbsenceBooksTest,
                         testing::Values("int8", "int4", "onebit", "onebit:down=onebit",
                                         "topk:density=0.03", "int4:hadamard=1",
                                         "int8:rounding=stochastic"));

// The ranks without a gradient of b alternate, and in some steps no rank has one.
TEST_P(AbsenceBooksTest, LoseNothing) {
  std::vector<double> given(kA + kB + kC), sent(given.size()), kept(given.size());
  std::mutex mu;
  RunRanks(Wire::kInProcess, kWorld, SmallChunks(GetParam()), [&](int rank, Engine& engine) {
    for (int step = 0; step < 40; ++step) {
      const bool absent = (step + rank) % 3 == 0 || step % 7 == 0;
      std::vector<float> values = Gradient(given.size(), 5, rank, step);
      const std::vector<float> mean = Reduce(engine, rank, step, absent, Segments(0));
      const std::lock_guard lock(mu);
      for (size_t i = 0; i < given.size(); ++i) {
        if (!absent || i < kA || i >= kA + kB) given[i] += values[i];
        if (rank == 0) sent[i] += kWorld * double{mean[i]};
      }
    }
    const std::lock_guard lock(mu);
    size_t at = 0;
    for (const char* name : {"a", "b", "c"}) {
      const ParameterResidual residual = Kept(engine, name);
      for (size_t i = 0; i < residual.first.size(); ++i) {
        kept[at++] += residual.first[i] + kWorld * double{residual.second[i]};
      }
    }
  });
  for (size_t i = 0; i < given.size(); ++i) ASSERT_NEAR(sent[i] + kept[i], given[i], 2e-6) << i;
}

TEST(Absence, OfASegmentThatIsNotThereIsAnError) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int4"), [](int, Engine& engine) {
    std::vector<float> values(100);
    const uint32_t number = 1;
    EXPECT_TRUE(absl::IsInvalidArgument(
        engine
            .Start(
                {.input = View(values), .output = View(values), .key = "g", .absent = {&number, 1}})
            .status()));
  });
}

// A divisor of twice the ranks halves the mean exactly, in every algorithm and in later steps.
TEST(Divisor, ReplacesTheNumberOfRanks) {
  for (const int world : {1, 2, 3, 4}) {
    for (const char* codec : {"fp32", "int4", "adaptive", "topk:density=0.02"}) {
      for (const size_t one_hop : {size_t{0}, size_t{1} << 20}) {
        for (const Topology topology : {Topology::kFlat, Topology::kGrid}) {
          Options options = SmallChunks(codec);
          options.one_hop_bytes = one_hop;
          options.topology = topology;
          RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
            for (int step = 0; step < 3; ++step) {
              std::vector<float> mean = Gradient(5000, 3, rank, step), half = mean;
              for (std::vector<float>* values : {&mean, &half}) {
                const float divisor = values == &half ? 2.0f * static_cast<float>(world) : 0.0f;
                auto work = engine.Start(
                    {.input = View(*values), .output = View(*values), .divisor = divisor});
                ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
              }
              for (size_t i = 0; i < mean.size(); ++i) {
                ASSERT_EQ(half[i], mean[i] / 2) << codec << " of " << world << " ranks at " << i;
              }
            }
          });
        }
      }
    }
  }
}

TEST(Divisor, MakesAWeightedMeanThatIsEqualOnAllRanks) {
  Options options = SmallChunks("fp32");
  std::vector<std::vector<float>> results(kWorld);
  RunRanks(Wire::kInProcess, kWorld, options, [&](int rank, Engine& engine) {
    for (int step = 0; step < 3; ++step) {  // rank 2 takes no part
      const float weights[kWorld] = {1.0f, 0.5f + static_cast<float>(step), 0.0f};
      const float sum = weights[0] + weights[1];
      std::vector<float> values = Gradient(4000, 3, rank, step);
      for (float& value : values) value *= weights[rank];
      auto work =
          engine.Start({.input = View(values), .output = View(values), .key = "g", .divisor = sum});
      ASSERT_TRUE(work.ok()) << work.status();
      ASSERT_TRUE((*work)->Wait().ok());
      const std::vector<float> a = Gradient(4000, 3, 0, step), b = Gradient(4000, 3, 1, step);
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_NEAR(values[i], (a[i] + weights[1] * b[i]) / sum, 1e-8);
      }
      results[rank].insert(results[rank].end(), values.begin(), values.end());
    }
  });
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// The next step's divisor is unknown, so such a tensor is announced; other tensors are predicted.
TEST(Divisor, MayChangeFromStepToStepWhereOrdersArePredicted) {
  Options options = SmallChunks("int4");
  options.predict = Predict::kAlways;
  RunRanks(Wire::kInProcess, kWorld, options, [](int rank, Engine& engine) {
    for (int step = 0; step < 6; ++step) {
      std::vector<float> divided = Gradient(3000, 3, rank, step), other = divided;
      auto first = engine.Start({.input = View(divided),
                                 .output = View(divided),
                                 .key = "divided",
                                 .divisor = 1.0f + static_cast<float>(step)});
      auto second = engine.Start({.input = View(other), .output = View(other), .key = "other"});
      engine.EndStep();
      ASSERT_TRUE(first.ok() && second.ok());
      EXPECT_TRUE((*first)->Wait().ok()) << (*first)->Wait();
      EXPECT_TRUE((*second)->Wait().ok()) << (*second)->Wait();
    }
  });
}

TEST(Divisor, ThatCanBeNoneIsRefusedBeforeAnythingIsSent) {
  const auto refused = [](const Options& options, CollectiveRequest request) {
    RunRanks(Wire::kInProcess, 2, options, [&](int, Engine& engine) {
      std::vector<float> values(100), all(200);
      CollectiveRequest own = request;
      own.input = View(values);
      own.output = own.collective == Collective::kAllGather ? View(all) : View(values);
      const absl::Status status = engine.Start(own).status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_NE(status.message().find("divisor"), absl::string_view::npos) << status;
    });
  };
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float divisor : {-1.0f, infinity, infinity - infinity, 1e-40f}) {
    refused(SmallChunks("int4"), {.input = {}, .output = {}, .key = "g", .divisor = divisor});
  }
  refused(SmallChunks("int4"),
          {.input = {}, .output = {}, .key = "g", .op = Op::kSum, .divisor = 2.0f});
  refused(SmallChunks("int4"),
          {.input = {}, .output = {}, .collective = Collective::kAllGather, .divisor = 2.0f});
  Options momentum = SmallChunks("int4");
  momentum.momentum.beta = 0.9f;
  refused(momentum, {.input = {}, .output = {}, .key = "g", .divisor = 2.0f});
}

TEST(Absence, OverlapLeavesTheOwnShardOut) {
  const std::vector<Range> ranges = {{0, 10}, {20, 40}};
  EXPECT_EQ(Overlap(ranges, {5, 30}, {8, 25}), (std::vector<Range>{{0, 3}, {20, 25}}));
  EXPECT_EQ(Overlap(ranges, {5, 30}, {}), (std::vector<Range>{{0, 5}, {15, 25}}));
  EXPECT_EQ(Overlap(ranges, {10, 20}, {}), std::vector<Range>{});
  EXPECT_EQ(Overlap(ranges, {0, 40}, {0, 40}), std::vector<Range>{});
}

}  // namespace
}  // namespace thinwire
