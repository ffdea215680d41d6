// Predicted orders: how they follow from a step, and that engines which use them give the same
// bits, or a typed error if the step differs.
#include "schedule/order/prediction.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <random>
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

Options OptionsOf(Policy policy) {
  Options options;
  options.policy = policy;
  options.chunk_bytes = 1024 * sizeof(float);
  return options;
}

TEST(Prediction, OrdersTheNextStepByTheLastOnesTimes) {
  Prediction prediction(OptionsOf(Policy::kP3), {0.5, 0.5});
  // Tensor 2 is ready first and long; tensor 1, which is needed first, becomes ready meanwhile.
  const Report late = Of(2, 9, 4096, 4), early = Of(1, 1);
  prediction.EndStep(10.0);
  prediction.OnSubmitted(late, 10.0);
  prediction.OnReady(late.id(), 10.0);
  prediction.OnSubmitted(early, 10.5);
  prediction.EndStep(10.5);
  EXPECT_TRUE(prediction.Next().chunks.empty());  // not all ranks have submitted it
  prediction.OnReady(early.id(), 11.5);
  for (int chunk = 1; chunk <= 4; ++chunk) {
    prediction.OnChunkDone(9.0 + chunk, 10.0 + chunk, 1024 * sizeof(float));
  }
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
  EXPECT_TRUE(prediction.Next().chunks.empty());  // a step is predicted once
}

// Runs a step of `tensors` tensors of one chunk, all ready at `now`. A chunk takes a second on the
// link and three more to arrive, and four are under way at once. Returns the time of the step's
// end.
double RunStep(Prediction& prediction, uint64_t step, uint64_t tensors, double now) {
  const double begin = now;
  for (uint64_t key = 1; key <= tensors; ++key) {
    Report report = Of(key, 0);
    report.call = step;
    prediction.OnSubmitted(report, begin);
    prediction.OnReady(report.id(), begin);
  }
  for (uint64_t key = 1; key <= tensors; ++key) {
    now = begin + 3.0 + static_cast<double>(key);
    prediction.OnChunkDone(now - 4.0, now, 1024 * sizeof(float));
  }
  prediction.EndStep(++now);
  return now;
}

TEST(Prediction, ForgetsAStepThatIsNotToComeAgain) {
  Prediction prediction(OptionsOf(Policy::kP3), {0.5, 0.5});
  prediction.OnSubmitted(Of(9, 0), 0.0);  // of an outdated layout
  prediction.OnReady(Of(9, 0).id(), 0.0);
  prediction.ForgetStep(0.5);
  RunStep(prediction, 0, 2, 1.0);
  const Prediction::NextStep next = prediction.Next();
  ASSERT_EQ(next.tensors.size(), 2u);
  for (const Report& tensor : next.tensors) EXPECT_NE(tensor.key, 9u);
}

// The first chunk after a pause takes all its latencies to arrive, and later ones only the link's
// time. A step that sends little does not show the link's rate.
TEST(Prediction, TheRateIsTheLinksAndNotThatOfItsLatencyOrOfAShortStep) {
  Prediction prediction(OptionsOf(Policy::kP3), {0.5, 0.5});
  constexpr double kRate = 1024 * sizeof(float);
  EXPECT_EQ(prediction.bytes_per_s(), 0.0);
  double now = 0.0;
  for (uint64_t step = 0; step < 4; ++step) now = RunStep(prediction, step, 16, now);
  EXPECT_DOUBLE_EQ(prediction.chunk_s(), 4.0);
  EXPECT_NEAR(prediction.bytes_per_s(), kRate, 0.02 * kRate);
  now = RunStep(prediction, 4, 2, now);
  EXPECT_NEAR(prediction.bytes_per_s(), kRate, 0.02 * kRate);
  for (uint64_t step = 5; step < 8; ++step) now = RunStep(prediction, step, 2, now);
  EXPECT_LE(prediction.bytes_per_s(), 0.5 * kRate) << "a link that became slower is known in time";
}

// A rate that the window limits grows from step to step, and the window must grow ahead of it.
TEST(Prediction, TheWindowIsWideWhileTheRateGrows) {
  Prediction prediction(OptionsOf(Policy::kP3), {0.5, 0.5});
  std::vector<uint32_t> windows;
  double now = 0.0;
  for (uint64_t step = 0; step < 3; ++step) {
    now = RunStep(prediction, step, 16, now);
    const Prediction::NextStep next = prediction.Next();
    ASSERT_EQ(next.chunks.size(), 16u);
    windows.push_back(next.chunks[0].window_kib);
  }
  // In KiB: four lanes of 4, plus four times a hop's two seconds at 4 per second; later as
  // predicted, which is one chunk and at least three quarters of a hop's time.
  EXPECT_EQ(windows[0], 4u * 4 + 4 * 2 * 4);
  EXPECT_LE(windows[2], windows[0] * 3 / 4);
  EXPECT_GE(windows[2], 4u + 3 * 2 * 4 / 4) << "a hop is on its way";
}

// Four chunks arrive at once every four seconds, as from a buffer: measured over the time of a
// chunk, twice the step's rate. Tensor 1 is needed first, and ready when six chunks can have
// passed.
TEST(Prediction, AnOrderIsForTheRateOfAStepAndNotForThatOfABurst) {
  Prediction prediction(OptionsOf(Policy::kP3), {0.5, 0.5});
  const Report late = Of(2, 9, 16 * 1024, 16), early = Of(1, 1);
  prediction.EndStep(0.0);
  for (const auto& [report, ready_s] : {std::pair{late, 0.0}, {early, 6.0}}) {
    prediction.OnSubmitted(report, ready_s);
    prediction.OnReady(report.id(), ready_s);
  }
  prediction.EndStep(7.0);
  for (double now = 4.0; now <= 16.0; now += 4.0) {
    for (int chunk = 0; chunk < 4; ++chunk) {
      prediction.OnChunkDone(now - 1.0, now, 1024 * sizeof(float));
    }
  }
  EXPECT_DOUBLE_EQ(prediction.bytes_per_s(), 2.0 * 1024 * sizeof(float));
  const Prediction::NextStep plan = prediction.Next();
  ASSERT_EQ(plan.chunks.size(), 17u);
  const auto place = std::ranges::find(plan.chunks, 7u, &PredictedChunk::partition_hash);
  EXPECT_GE(place - plan.chunks.begin(), 6);
  EXPECT_LE(place - plan.chunks.begin(), 9);
}

// While first hops are on their way the link has time for as many other hops.
TEST(PredictOrder, KnowsThatAChunksHopsLeaveTheLinkBetween) {
  const std::vector<ExpectedTensor> tensors = {{0.0, 8.0, 9, 8}, {4.0, 1.0, 0, 1}};
  const auto place = [&](const ExpectedLink& link) {
    const std::vector<ChunkOfStep> order = PredictOrder(tensors, Policy::kP3, link, 0.0);
    return std::find(order.begin(), order.end(), ChunkOfStep{1, 0}) - order.begin();
  };
  EXPECT_EQ(place({0.0, {1.0}}), 4);
  EXPECT_EQ(place({10.0, {0.5, 0.5}}), 8);
}

// The model expects a slower link than it was: tensor 0 was done before tensor 1 was ready, as if a
// caller waited for it. Tensor 2, equally urgent, was ready before that.
TEST(PredictOrder, WhatWasDoneBeforeAnotherWasReadyStaysAhead) {
  const std::vector<ExpectedTensor> tensors = {
      {0.0, 8.0, 9, 8, 3.0}, {3.5, 1.0, 0, 1}, {2.5, 1.0, 0, 1}};
  const std::vector<ChunkOfStep> order = PredictOrder(tensors, Policy::kP3, {0.0, {1.0}}, 0.0);
  ASSERT_EQ(order.size(), 10u);
  EXPECT_EQ(order.back(), (ChunkOfStep{1, 0}));
  EXPECT_EQ(order[3], (ChunkOfStep{2, 0}));
}

// A chunk takes half a second on the link and a second to arrive, twice. A window of half a second
// lets one chunk at a time through, since its second hop counts like its first; one of a second
// lets two through and then the third; one of three seconds all at once, and the second hops of the
// first two pass during the last one's latency. The forward pass takes half of the second by which
// the first tensor follows the other.
TEST(PredictEnd, AddsUp) {
  const ExpectedLink link{1.0, {0.5, 0.5}};
  const std::vector<ExpectedTensor> one = {{2.0, 3.0, 0, 3}};
  const std::vector<ChunkOfStep> order = PredictOrder(one, Policy::kP3, link, 0.0);
  EXPECT_DOUBLE_EQ(PredictEnd(one, order, Policy::kP3, link, 0.5), 2.0 + 3 * 3.0);
  EXPECT_DOUBLE_EQ(PredictEnd(one, order, Policy::kP3, link, 1.0), 2.0 + 6.0);
  EXPECT_DOUBLE_EQ(PredictEnd(one, order, Policy::kP3, link, 3.0), 2.0 + 4.0);
  const std::vector<ExpectedTensor> two = {{0.0, 1.0, 1, 1}, {1.0, 1.0, 0, 1}};
  const std::vector<ChunkOfStep> both = {{0, 0}, {1, 0}};
  EXPECT_DOUBLE_EQ(PredictEnd(two, both, Policy::kP3, link, 9.0), 4.0 + 0.5);
  EXPECT_DOUBLE_EQ(PredictEnd(two, both, Policy::kWfbp, link, 9.0), 4.0);
}

// For any step no chunk is lost, and no fixed window ends the step much earlier.
TEST(PredictStep, TakesTheWindowThatEndsTheStepFirst) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<ExpectedTensor> tensors(1 + random() % 12);
    size_t chunks = 0;
    double ready = 0.0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      ready += static_cast<double>(random() % 100) / 100;
      const auto count = static_cast<uint32_t>(1 + random() % 5);
      tensors[t] = {ready, count * (1.0 + static_cast<double>(random() % 10)) / 10,
                    static_cast<int>(tensors.size() - t), count};
      chunks += count;
    }
    const ExpectedLink link{static_cast<double>(random() % 30) / 10,
                            random() % 2 == 0 ? std::vector<double>{0.5, 0.5}
                                              : std::vector<double>{0.4, 0.1, 0.1, 0.4}};
    const auto policy = static_cast<Policy>(random() % 3);
    const auto hops = static_cast<double>(link.hop_shares.size());
    const double chunk_s = 0.1 + link.hop_s * hops, hop_s = chunk_s / hops;
    const PredictedStep step = PredictStep(tensors, policy, link, chunk_s, 0.2);
    ASSERT_EQ(step.order.size(), chunks) << "round " << round;
    const double end = PredictEnd(tensors, step.order, policy, link, step.window_s);
    for (const double backlog : {0.5, 2.0}) {
      const auto order = PredictOrder(tensors, policy, link, backlog * 0.2);
      for (const double times : {1.0, 2.0, 4.0}) {
        const double window_s = 0.2 + times * hop_s;
        ASSERT_LE(end, 1.01 * PredictEnd(tensors, order, policy, link, window_s))
            << "round " << round;
      }
    }
  }
}

TEST(Prediction, LeavesOutWhatIsCalledTwice) {
  Prediction prediction(OptionsOf(Policy::kWfbp), {1.0});
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

// A slow rank may report a step's tensor only after the next step has ended as well.
TEST(Prediction, NothingFollowsFromAStepWhoseNextOneIsOver) {
  for (const bool over : {false, true}) {
    Prediction prediction(OptionsOf(Policy::kWfbp), {1.0});
    prediction.OnSubmitted(Of(1, 0), 1.0);
    prediction.EndStep(2.0);
    if (over) prediction.ForgetStep(3.0);
    prediction.OnReady(Of(1, 0).id(), 4.0);
    EXPECT_EQ(prediction.Next().chunks.empty(), over);
  }
}

Options Planned(const std::string& codec, Predict predict) {
  Options options = SmallChunks(codec);
  options.policy = Policy::kP3;
  options.predict = predict;
  return options;
}

constexpr int kSteps = 8, kTensors = 6;

// Runs a step of tensors of several sizes, submitted last to first, each rank at its own pace.
void Step(int rank, Engine& engine, int step, std::vector<std::vector<float>>* values) {
  std::vector<UsePtr> works;
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

// Returns each rank's results of all steps.
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
      // All chunks of all steps but the first, on every rank.
      EXPECT_EQ(planned, 3u * (kSteps - 1) * (1 + 2 + 3 + 4 + 5 + 6));
      for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(got[rank] == expected[0]) << rank;
    }
  }
}

// Some steps lack a tensor with more chunks than may be held. From step `waits_from` on every call
// waits for its mean, as under FSDP2; before that, only the step does. Ranks end their steps at
// different times, so a rank may have started chunks that the others' step lacks.
std::vector<std::vector<float>> TrainOfManySteps(Wire wire, const Options& options, int waits_from,
                                                 std::vector<uint64_t>* planned) {
  std::vector<std::vector<float>> results(3);
  RunRanks(wire, 3, options, [&](int rank, Engine& engine) {
    constexpr int kNone = -1;
    int before = kNone, step = 0;
    for (const int lacking : {kNone, kNone, kNone, 5, 5, 5, 5, 4, 5, kNone, kNone, kNone, kNone}) {
      std::vector<std::vector<float>> values;
      std::vector<UsePtr> works;
      for (int t = 0; t < kTensors; ++t) {
        values.push_back(Gradient(1000 * (t + 1) + 17, t, rank, step));
      }
      for (int t = kTensors; t-- > 0;) {
        if (t == lacking) continue;
        std::vector<float>& x = values[t];
        auto work = engine.Start(
            {.input = View(x), .output = View(x), .key = "t" + std::to_string(t), .priority = t});
        ASSERT_TRUE(work.ok()) << work.status();
        works.push_back(*work);
        if (step < waits_from) continue;
        const absl::Status status = works.back()->Wait();
        ASSERT_TRUE(status.ok()) << status;
      }
      step++ > 0 && lacking == before ? engine.EndStep() : engine.ForgetStep();
      for (const auto& work : works) ASSERT_TRUE(work->Wait().ok());
      before = lacking;
      for (int t = 0; t < kTensors; ++t) {
        if (t == lacking) continue;
        results[rank].insert(results[rank].end(), values[t].begin(), values[t].end());
      }
      if (rank == 0) planned->push_back(engine.stats().predicted_chunks);
    }
  });
  return results;
}

TEST(Predicted, ComesBackWhereStepsLackTensors) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    for (const bool waits : {true, false}) {
      const int waits_from = waits ? 0 : std::numeric_limits<int>::max();
      Options announced = Planned("int4", Predict::kNever),
              ahead = Planned("int4", Predict::kAlways);
      // The first call is predicted first, since the other calls wait for it.
      if (waits) announced.policy = ahead.policy = Policy::kWfbp;
      std::vector<uint64_t> none, planned;
      const auto expected = TrainOfManySteps(wire, announced, waits_from, &none);
      const auto got = TrainOfManySteps(wire, ahead, waits_from, &planned);
      for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(got[rank] == expected[0]) << rank;
      EXPECT_EQ(none.back(), 0u);
      for (size_t step = planned.size(); step-- > 1;) planned[step] -= planned[step - 1];
      if (!waits) {  // a step's first tensors may precede its prediction
        EXPECT_GT(planned[2], 0u);
        EXPECT_GT(planned[5], 0u);
        EXPECT_GT(planned[11], 0u);
        continue;
      }
      // Tensor 5 has 6 of the 21 chunks, and tensor 4 has 5.
      EXPECT_EQ(planned, (std::vector<uint64_t>{0, 0, 21, 15, 0, 15, 15, 10, 0, 0, 0, 21, 21}));
    }
  }
}

// Step 2's order follows from step 1, in which no call waits: the last tensor is urgent and comes
// first, but no rank submits it before the first one is done. All later steps wait in the same way.
TEST(Predicted, CallsThatWaitAgainstThePredictedOrderEnd) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    std::vector<uint64_t> none, planned;
    const auto expected = TrainOfManySteps(wire, Planned("int4", Predict::kNever), 2, &none);
    const auto got = TrainOfManySteps(wire, Planned("int4", Predict::kAlways), 2, &planned);
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(got[rank] == expected[0]) << rank;
    EXPECT_EQ(planned[12] - planned[11], 21u) << "all of the last step";
  }
}

TEST(Predicted, ATensorOutsideThePlanIsAnnounced) {
  RunRanks(Wire::kInProcess, 2, Planned("int4", Predict::kAlways), [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    for (int step = 0; step < kSteps; ++step) {
      Step(rank, engine, step, &values);
      // Between steps, when all of the next step is predicted and none of it submitted.
      std::vector<float> metric(5000 + 1000 * step, static_cast<float>(rank));
      ASSERT_TRUE(AllReduce(engine, metric, "").ok());
      EXPECT_NEAR(metric[0], 0.5f, 0.1f);
    }
  });
}

TEST(Predicted, StepsOfOtherTensorsMayComeBeforeThoseThatRepeat) {
  RunRanks(Wire::kInProcess, 2, Planned("int4", Predict::kAlways), [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    std::vector<float> once(5000, static_cast<float>(rank));
    ASSERT_TRUE(AllReduce(engine, once, "once").ok());
    engine.ForgetStep();
    for (int step = 0; step < kSteps; ++step) Step(rank, engine, step, &values);
    EXPECT_GT(engine.stats().predicted_chunks, 0u);
  });
}

TEST(Predicted, AnotherStepIsATypedErrorOnEveryRank) {
  std::atomic<int> ended = 0;
  RunRanks(Wire::kInProcess, 3, Planned("fp32", Predict::kAlways), [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    Step(rank, engine, 0, &values);
    Step(rank, engine, 1, &values);
    ++ended;
    while (ended < 3) std::this_thread::yield();  // else another rank's step might get the error
    std::vector<float> other(rank == 1 ? 9000 : 1017);
    const absl::Status status = AllReduce(engine, other, "t0");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(status.message().find("t0"), std::string::npos) << status;
  });
}

TEST(Predicted, ARankThatStopsIsADeadline) {
  Options options = Planned("fp32", Predict::kAlways);
  options.timeout = std::chrono::seconds(3);  // the first steps must succeed within it
  std::barrier all(3);
  RunRanks(Wire::kInProcess, 3, options, [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> values;
    Step(rank, engine, 0, &values);
    Step(rank, engine, 1, &values);
    if (rank == 2) {
      const Deadline latest = Clock::now() + std::chrono::seconds(60);
      while (engine.status().ok() && Clock::now() < latest) std::this_thread::yield();
      EXPECT_FALSE(engine.status().ok());
    } else {
      std::vector<float> x(1017);
      const absl::Status status = AllReduce(engine, x, "t0");
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      EXPECT_NE(status.message().find("rank 2 never submitted it"), std::string::npos) << status;
    }
    all.arrive_and_wait();  // else a rank without the reason would see this one as lost
  });
}

TEST(Predicted, OnlyWhereRanksAreFarApart) {
  for (const bool far : {false, true}) {
    Options options = Planned("int4", Predict::kWhenFar);
    options.far = far ? std::chrono::microseconds(0) : std::chrono::hours(1);
    std::atomic<uint64_t> planned{0};
    Train(Wire::kInProcess, 2, options, &planned);
    EXPECT_EQ(planned > 0, far);
  }
}

}  // namespace
}  // namespace thinwire
