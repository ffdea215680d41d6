// Predicted orders: what follows from a step, and that engines which go by it give the same
// bits, or a typed error where the step was another one.
#include "schedule/order/prediction.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

Report Of(uint64_t key, int priority, uint64_t numel = 1024, uint32_t chunks = 1) {
  Report report;
  report.key = key;
  report.numel = numel;
  report.chunks = chunks;
  report.priority = priority;
  report.partition_hash = 7 * key;
  return report;
}

TEST(Prediction, OrdersTheNextStepByTheLastOnesTimes) {
  Prediction prediction(Policy::kP3);
  // Tensor 2 is ready first and long; tensor 1, which is needed first, while it is on its way.
  const Report late = Of(2, 9, 4096, 4), early = Of(1, 1);
  prediction.EndStep(10.0);
  prediction.OnSubmitted(late, 10.0);
  prediction.OnReady(late.id(), 10.0);
  prediction.OnSubmitted(early, 10.5);
  prediction.EndStep(10.5);
  EXPECT_TRUE(prediction.Next().chunks.empty());  // not all ranks have it
  prediction.OnReady(early.id(), 11.5);
  prediction.OnDone(late.id(), 14.0);
  const Prediction::NextStep plan = prediction.Next();
  ASSERT_EQ(plan.chunks.size(), 5u);
  EXPECT_EQ(plan.tensors[0].call, 1u);
  std::vector<uint64_t> order;
  for (const PredictedChunk& chunk : plan.chunks) {
    order.push_back(chunk.partition_hash / 7);
    EXPECT_EQ(chunk.id, plan.tensors[chunk.partition_hash == 14 ? 0 : 1].id());
  }
  EXPECT_EQ(order.front(), 2u);
  EXPECT_EQ(std::count(order.begin(), order.end(), 1u), 1);
  EXPECT_NE(order.back(), 1u);                    // it overtakes
  EXPECT_TRUE(prediction.Next().chunks.empty());  // once
}

// The first chunk after a pause takes all its latencies to arrive, and those after it only the
// link's time.
TEST(Prediction, TheRateIsTheLinksAndNotThatOfItsLatency) {
  Prediction prediction(Policy::kP3);
  // Each tensor is a chunk that takes a second on the link and three more on its way.
  double now = 0.0;
  for (uint64_t step = 0; step < 8; ++step) {
    const double begin = now;
    for (uint64_t key = 1; key <= 4; ++key) {
      Report report = Of(key, 0);
      report.call = step;
      prediction.OnSubmitted(report, begin);
      prediction.OnReady(report.id(), begin);
    }
    for (uint64_t key = 1; key <= 4; ++key) {
      Report report = Of(key, 0);
      report.call = step;
      now = begin + 3.0 + static_cast<double>(key);
      prediction.OnChunkDone(begin + static_cast<double>(key) - 1.0, now);
      prediction.OnDone(report.id(), now);
    }
    prediction.EndStep(now += 1.0);
  }
  EXPECT_DOUBLE_EQ(prediction.chunk_s(), 4.0);
  EXPECT_NEAR(prediction.bytes_per_s(), 1024 * sizeof(float), 0.02 * 1024 * sizeof(float));
}

TEST(Prediction, LeavesOutWhatIsCalledTwice) {
  Prediction prediction(Policy::kWfbp);
  Report once = Of(1, 0), twice = Of(2, 0), again = twice;
  again.call = 1;
  for (const Report& report : {once, twice, again}) {
    prediction.OnSubmitted(report, 1.0);
    prediction.OnReady(report.id(), 2.0);
  }
  prediction.EndStep(3.0);
  const Prediction::NextStep plan = prediction.Next();
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.tensors[0].key, once.key);
}

Options Planned(const std::string& codec, Predict predict) {
  Options options = SmallChunks(codec);
  options.policy = Policy::kP3;
  options.predict = predict;
  return options;
}

constexpr int kSteps = 8, kTensors = 6;

// A step of tensors of several sizes, submitted from the last to the first, each rank at its own
// pace.
void Step(int rank, Engine& engine, int step, std::vector<std::vector<float>>* values) {
  std::vector<std::shared_ptr<Work>> works;
  values->clear();
  for (int t = 0; t < kTensors; ++t) {
    values->push_back(Gradient(1000 * (t + 1) + 17, t, rank, step));
  }
  for (int t = kTensors; t-- > 0;) {
    if ((step + rank) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(rank + 1));
    std::vector<float>& x = (*values)[t];
    auto work = engine.Start(
        {.input = View(x), .output = View(x), .key = "t" + std::to_string(t), .priority = t});
    ASSERT_TRUE(work.ok()) << work.status();
    works.push_back(*work);
  }
  engine.EndStep();
  for (const auto& work : works) ASSERT_TRUE(work->Wait().ok());
}

// The results of all ranks in all steps, by rank.
std::vector<std::vector<float>> Train(Wire wire, int world, const Options& options,
                                      std::atomic<uint64_t>* planned) {
  std::vector<std::vector<float>> results(world);
  RunRanks(wire, world, options, [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    for (int step = 0; step < kSteps; ++step) {
      Step(rank, engine, step, &values);
      for (const auto& x : values) {
        results[rank].insert(results[rank].end(), x.begin(), x.end());
      }
    }
    *planned += engine.stats().predicted_chunks;
  });
  return results;
}

TEST(Predicted, GivesTheSameBits) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    for (const char* codec : {"fp32", "int4"}) {
      std::atomic<uint64_t> announced{0}, planned{0};
      const auto expected = Train(wire, 3, Planned(codec, Predict::kNever), &announced);
      const auto got = Train(wire, 3, Planned(codec, Predict::kAlways), &planned);
      EXPECT_EQ(announced, 0u);
      // Every chunk of every step but the first, on every rank.
      EXPECT_EQ(planned, 3u * (kSteps - 1) * (1 + 2 + 3 + 4 + 5 + 6));
      for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(got[rank] == expected[0]) << rank;
    }
  }
}

TEST(Predicted, ATensorOutsideThePlanIsAnnounced) {
  RunRanks(Wire::kInProcess, 2, Planned("int4", Predict::kAlways), [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    for (int step = 0; step < kSteps; ++step) {
      Step(rank, engine, step, &values);
      // Between steps, while all of the next one is announced and none of it submitted.
      std::vector<float> metric(5000, static_cast<float>(rank));
      ASSERT_TRUE(AllReduce(engine, metric, "").ok());
      EXPECT_NEAR(metric[0], 0.5f, 0.1f);
    }
  });
}

TEST(Predicted, AnotherStepIsATypedErrorOnEveryRank) {
  std::atomic<int> ended = 0;
  RunRanks(Wire::kInProcess, 3, Planned("fp32", Predict::kAlways), [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    Step(rank, engine, 0, &values);
    Step(rank, engine, 1, &values);
    ++ended;
    while (ended < 3) std::this_thread::yield();  // else the error may come into another's step
    std::vector<float> other(rank == 1 ? 9000 : 1017);
    const absl::Status status = AllReduce(engine, other, "t0");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(status.message().find("t0"), std::string::npos) << status;
  });
}

TEST(Predicted, ARankThatStopsIsADeadline) {
  Options options = Planned("fp32", Predict::kAlways);
  options.timeout = std::chrono::milliseconds(600);
  RunRanks(Wire::kInProcess, 3, options, [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    Step(rank, engine, 0, &values);
    Step(rank, engine, 1, &values);
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      EXPECT_FALSE(engine.status().ok());
      return;
    }
    std::vector<float> x(1017);
    const absl::Status status = AllReduce(engine, x, "t0");
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find("rank 2 never submitted it"), std::string::npos) << status;
  });
}

TEST(Predicted, OnlyWhereRanksAreFarApart) {
  for (const bool far : {false, true}) {
    Options options = Planned("int4", Predict::kWhenFar);
    options.far = far ? std::chrono::microseconds(0) : std::chrono::seconds(1);
    std::atomic<uint64_t> planned{0};
    Train(Wire::kInProcess, 2, options, &planned);
    EXPECT_EQ(planned > 0, far);
  }
}

}  // namespace
}  // namespace thinwire
