// The sequencers of all ranks on a virtual clock. In every possible order of messages, submissions
// and ends of exchanges all chunks run exactly once and follow the rules; chunks that can't finish
// are named in time.
#include "schedule/order/sequencer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "tests/effort.h"
#include "tests/schedule/orderings.h"
#include "tests/schedule/sequencer_host.h"

namespace thinwire {
namespace {

class SequencerTest : public OrderingTest {};
INSTANTIATE_TEST_SUITE_P(All, SequencerTest, AllOrderings(), OrderingName);

TEST_P(SequencerTest, EveryRandomScheduleRunsEveryChunkOnce) {
  constexpr uint64_t kSteps = 3;
  size_t predicted = 0;
  for (int seed = 0; seed < Rounds(1000); ++seed) {
    std::mt19937_64 random(seed);
    Options options;
    // Every second world has group heads.
    const bool groups = seed % 2 == 1;
    const int world = groups ? 3 + random() % 6 : 2 + random() % 3;
    if (groups) options.control_tree_from = 2;
    options.lanes = 1 + random() % 3;
    options.predicted_lanes = 1 + random() % 4;
    options.policy = static_cast<Policy>(random() % 3);
    options.predict = predict();
    options.chunk_bytes = 4096;
    Host host(world, options, matching());
    const size_t tensors = 1 + random() % 5;
    std::vector<uint32_t> chunks(tensors);
    std::vector<uint64_t> numels(tensors);
    size_t all = 0;
    for (size_t t = 0; t < tensors; ++t) {
      all += chunks[t] = 1 + random() % 3;
      numels[t] = chunks[t] * (1 + random() % 1280);
    }
    // By rank: its step, and the tensors of that step left to submit, in this rank's order.
    std::vector<uint64_t> step(world);
    std::vector<std::vector<size_t>> left(world);
    // true: a rank waits for a step's end before it submits the next one.
    const bool waits = random() % 2 == 0;
    const auto begin = [&](int rank) {
      for (size_t t = 0; t < tensors; ++t) left[rank].push_back(t);
      std::shuffle(left[rank].begin(), left[rank].end(), random);
    };
    for (int r = 0; r < world; ++r) begin(r);
    const auto submit = [&](int rank) {
      if (left[rank].empty()) return begin(rank);
      const size_t t = left[rank].back();
      left[rank].pop_back();
      host.Submit(rank, Of(t + 1, step[rank], chunks[t], numels[t]));
      if (!left[rank].empty()) return;
      host.EndStep(rank);
      ++step[rank];
    };
    const auto may_submit = [&](int rank) {
      if (left[rank].empty()) return step[rank] < kSteps && (!waits || host.IsIdle(rank));
      // Only one use per name may be in flight.
      const uint64_t t = left[rank].back();
      return step[rank] == 0 || !host.InFlight(rank, Of(t + 1, step[rank] - 1).id());
    };
    for (bool more = true; more;) {
      std::vector<std::function<void()>> submissions;
      for (int r = 0; r < world; ++r) {
        if (may_submit(r)) submissions.push_back([&, r] { submit(r); });
      }
      more = RunOne(host, random, std::move(submissions));
    }
    for (int r = 0; r < world; ++r) {
      ASSERT_TRUE(host.failure(r).ok()) << "seed " << seed << ": " << host.failure(r);
      ASSERT_TRUE(host.IsIdle(r)) << "seed " << seed << ", rank " << r << "\n" << host.Describe(r);
      ASSERT_EQ(host.Order(r).size(), kSteps * all) << "seed " << seed << ", rank " << r;
      if (matching() == Matching::kByOrder) {
        ASSERT_EQ(host.Order(r), host.Order(0)) << "seed " << seed << ", rank " << r;
      }
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    predicted += host.predicted();
  }
  EXPECT_EQ(predicted > 0, predict() == Predict::kAlways);
}

// A program whose steps lack some tensors: others in each step, or the same ones for some steps.
struct Steps {
  Steps(std::mt19937_64& random, size_t tensors, size_t count) {
    std::vector<size_t> step;
    std::vector<uint64_t> calls(tensors);
    for (size_t s = 0; s < count; ++s) {
      if (s == 0 || random() % 3 == 0) {
        step.clear();
        for (size_t t = 0; t < tensors; ++t) {
          if (step.empty() || random() % 4 != 0) step.push_back(t);
        }
        std::shuffle(step.begin(), step.end(), random);
      }
      repeats.push_back(s > 0 && step == tensors_of.back());
      tensors_of.push_back(step);
      call_of.push_back(calls);
      for (const size_t t : step) ++calls[t];
    }
  }

  std::vector<std::vector<size_t>> tensors_of;  // by step
  std::vector<std::vector<uint64_t>> call_of;   // by step and tensor
  std::vector<bool> repeats;                    // by step: equals the previous one
};

// Rank 0 announces that the next step repeats or that it may differ, correctly or at random.
TEST(Sequencer, StepsThatLackPredictedTensorsRunEveryChunkOnce) {
  size_t predicted = 0, announced = 0;
  for (int seed = 0; seed < Rounds(3000); ++seed) {
    std::mt19937_64 random(seed);
    Options options;
    const bool groups = random() % 2 == 0;
    const int world = groups ? 3 + random() % 6 : 2 + random() % 3;
    if (groups) options.control_tree_from = 2;
    options.lanes = 1 + random() % 3;
    options.predicted_lanes = 1 + random() % 4;
    options.policy = static_cast<Policy>(random() % 3);
    options.predict = Predict::kAlways;
    options.chunk_bytes = 4096;
    Host host(world, options, Matching::kByTag);
    const size_t tensors = 2 + random() % 4;
    const Steps steps(random, tensors, 8);
    std::vector<uint32_t> chunks(tensors);
    for (uint32_t& count : chunks) count = 1 + random() % 6;
    const bool waits = random() % 2 == 0;      // for a step's end before the next step
    const bool one_order = random() % 2 == 0;  // the same on all ranks
    const bool knows = random() % 2 == 0;      // rank 0 knows which steps repeat
    std::vector<size_t> step(world);
    std::vector<std::vector<size_t>> left(world);
    const auto begin = [&](int rank) {
      left[rank] = steps.tensors_of[step[rank]];
      if (!one_order) std::shuffle(left[rank].begin(), left[rank].end(), random);
    };
    const auto submit = [&](int rank) {
      if (left[rank].empty()) return begin(rank);
      const size_t t = left[rank].back();
      left[rank].pop_back();
      host.Submit(rank, Of(t + 1, steps.call_of[step[rank]][t], chunks[t], chunks[t] * 1024));
      if (!left[rank].empty()) return;
      if (knows ? steps.repeats[step[rank]] : random() % 2 == 0) {
        host.EndStep(rank);
      } else {
        host.ForgetStep(rank);
      }
      ++step[rank];
    };
    const auto may_submit = [&](int rank) {
      if (left[rank].empty()) {
        return step[rank] < steps.tensors_of.size() && (!waits || host.IsIdle(rank));
      }
      const size_t t = left[rank].back();
      const uint64_t call = steps.call_of[step[rank]][t];
      return call == 0 || !host.InFlight(rank, Of(t + 1, call - 1).id());
    };
    for (bool more = true; more;) {
      std::vector<std::function<void()>> submissions;
      for (int r = 0; r < world; ++r) {
        if (may_submit(r)) submissions.push_back([&, r] { submit(r); });
      }
      more = RunOne(host, random, std::move(submissions));
    }
    size_t all = 0;
    for (const auto& each : steps.tensors_of) {
      for (const size_t t : each) all += chunks[t];
    }
    for (int r = 0; r < world; ++r) {
      ASSERT_TRUE(host.failure(r).ok()) << "seed " << seed << ": " << host.failure(r);
      ASSERT_TRUE(host.IsIdle(r)) << "seed " << seed << ", rank " << r << "\n" << host.Describe(r);
      ASSERT_EQ(host.Order(r).size(), all) << "seed " << seed << ", rank " << r;
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    predicted += host.predicted();
    announced += all * world - host.predicted();
  }
  EXPECT_GT(predicted, 0u);
  EXPECT_GT(announced, 0u);
}

// Before some calls of a step a rank waits until an earlier call of the step is done. With one
// order for all, these waits are the same on all ranks and in all steps; otherwise they are random.
TEST_P(SequencerTest, ProgramsThatWaitRunEveryChunkOnce) {
  constexpr size_t kSteps = 4;
  size_t predicted = 0, stood = 0;
  for (int seed = 0; seed < Rounds(1000); ++seed) {
    std::mt19937_64 random(seed);
    Options options;
    const bool groups = random() % 2 == 0;
    const int world = groups ? 3 + random() % 6 : 2 + random() % 3;
    if (groups) options.control_tree_from = 2;
    options.lanes = 1 + random() % 8;
    options.predicted_lanes = 1 + random() % 8;
    options.policy = static_cast<Policy>(random() % 3);
    options.predict = predict();
    options.chunk_bytes = 4096;
    Host host(world, options, matching());
    const size_t tensors = 2 + random() % 4;
    std::vector<uint32_t> chunks(tensors);
    for (uint32_t& count : chunks) count = 1 + random() % 6;
    const auto report = [&](size_t t, uint64_t step) {
      return Of(t + 1, step, chunks[t], chunks[t] * 1024);
    };
    std::vector<size_t> order(tensors);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    // By call: the position of the call it waits for, or its own if there is none.
    std::vector<size_t> waits_for(tensors);
    const auto draw = [&](std::vector<size_t>& waits) {
      waits.resize(tensors);
      for (size_t place = 0; place < tensors; ++place) {
        waits[place] = random() % 2 == 0 ? place : random() % (place + 1);
      }
    };
    draw(waits_for);
    std::vector<std::vector<size_t>> waits(world, waits_for);
    std::vector<size_t> step(world), place(world);
    const auto submit = [&](int rank) {
      host.Submit(rank, report(order[place[rank]], step[rank]));
      if (++place[rank] < tensors) return;
      host.EndStep(rank);
      place[rank] = 0;
      ++step[rank];
      if (matching() == Matching::kByTag) draw(waits[rank]);
    };
    const auto may_submit = [&](int rank) {
      if (step[rank] == kSteps) return false;
      const size_t t = order[place[rank]], other = order[waits[rank][place[rank]]];
      const bool is_over = other == t || !host.InFlight(rank, report(other, step[rank]).id());
      return is_over && (step[rank] == 0 || !host.InFlight(rank, report(t, step[rank] - 1).id()));
    };
    for (int stood_here = 0; stood_here < 100;) {
      std::vector<std::function<void()>> submissions;
      for (int r = 0; r < world; ++r) {
        if (may_submit(r)) submissions.push_back([&, r] { submit(r); });
      }
      if (RunOne(host, random, std::move(submissions))) continue;
      if (std::count(step.begin(), step.end(), kSteps) == world && host.IsIdle(0)) break;
      ++stood_here;
      ++stood;
      host.Advance(AnswerPatience(30.0));
      host.Clock();
    }
    for (int r = 0; r < world; ++r) {
      ASSERT_TRUE(host.failure(r).ok()) << "seed " << seed << ": " << host.failure(r);
      ASSERT_EQ(step[r], kSteps) << "seed " << seed << ", rank " << r << "\n" << host.Describe(r);
      ASSERT_TRUE(host.IsIdle(r)) << "seed " << seed << ", rank " << r << "\n" << host.Describe(r);
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    predicted += host.predicted();
  }
  EXPECT_EQ(predicted > 0, predict() == Predict::kAlways);
  // Only a step whose waits differ from those of the step before can stall.
  EXPECT_EQ(stood > 0, predict() == Predict::kAlways && matching() == Matching::kByTag);
}

// Runs a step of these tensors, of kChunks chunks each, on all ranks. Each call waits for its
// result, as under FSDP2. Returns how many chunks started ahead, summed over all ranks.
size_t RunStep(Host& host, const std::vector<uint64_t>& keys, std::map<uint64_t, uint64_t>& calls,
               bool repeats) {
  constexpr uint32_t kChunks = 6;
  const size_t before = host.predicted();
  for (const uint64_t key : keys) {
    const Report report = Of(key, calls[key]++, kChunks, kChunks * 1024);
    for (int r = 0; r < host.world(); ++r) host.Submit(r, report);
    Settle(host);
    for (int r = 0; r < host.world(); ++r) {
      EXPECT_TRUE(host.failure(r).ok()) << host.failure(r);
      EXPECT_TRUE(host.IsIdle(r)) << "tensor " << key << " waits for one that does not come\n"
                                  << host.Describe(r);
    }
  }
  for (int r = 0; r < host.world(); ++r) repeats ? host.EndStep(r) : host.ForgetStep(r);
  Settle(host);
  return host.predicted() - before;
}

// The tensor that is left out has more chunks than may be held.
TEST(Sequencer, PredictionComesBackWhereAStepLacksATensor) {
  Options options;
  options.predict = Predict::kAlways;
  Host host(3, options, Matching::kByTag);
  Settle(host);
  std::map<uint64_t, uint64_t> calls;
  const std::vector<uint64_t> all = {1, 2, 3}, fewer = {1, 3};
  std::vector<size_t> predicted;
  for (const auto& keys : {all, all, fewer, fewer, fewer, all, all, all}) {
    const bool first = predicted.empty();
    const bool repeats = first || predicted.size() % 3 != 2;  // steps 2 and 5 announce another
    predicted.push_back(RunStep(host, keys, calls, repeats));
  }
  EXPECT_EQ(predicted, (std::vector<size_t>{0, 54, 36, 0, 36, 36, 0, 54}));
}

// Rank 1 is a step ahead and starts chunks that the others' step lacks, before it learns that. The
// others start the same chunks once they have the tensor.
TEST(Sequencer, WhatARankHasStartedAheadGoesOnWhenItsTensorIsWithdrawn) {
  Options options;
  options.predict = Predict::kAlways;
  for (const bool hears_first : {true, false}) {
    Host host(3, options, Matching::kByTag);
    Settle(host);
    std::map<uint64_t, uint64_t> calls;
    RunStep(host, {1, 2, 3}, calls, true);
    const Report early = Of(1, 1, 6, 6 * 1024);
    host.Submit(1, early);
    const size_t ahead = host.predicted();
    EXPECT_GT(ahead, 0u);
    host.ForgetStep(0);
    if (hears_first) Settle(host);
    for (const int r : {0, 2}) host.Submit(r, early);
    host.ForgetStep(0);
    Settle(host);
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(host.failure(r).ok()) << host.failure(r);
      EXPECT_TRUE(host.IsIdle(r)) << host.Describe(r);
    }
    if (hears_first) {
      EXPECT_EQ(host.predicted(), ahead);
    }
    ++calls[1];
    EXPECT_EQ(RunStep(host, {1, 2, 3}, calls, true), 0u);
    EXPECT_EQ(RunStep(host, {1, 2, 3}, calls, true), 54u);
  }
}

// The first step makes all calls at once. In the second one some ranks wait for each call before
// the next. Tensor 3 is urgent, so it comes first in the predicted order, with more chunks than may
// be held; the other ranks have started it by then. Meanwhile tensors that are not predicted come
// and go.
TEST(Sequencer, AStepGoesOnWhereItsPredictedOrderCanNot) {
  constexpr uint32_t kChunks = 6;
  const auto report = [](uint64_t key, uint64_t call) {
    return Of(key, call, kChunks, kChunks * 1024);
  };
  for (const std::vector<int>& waiting : {std::vector{0, 1, 2}, {0}, {1}}) {
    Options options;
    options.policy = Policy::kP3;
    options.predict = Predict::kAlways;
    Host host(3, options, Matching::kByTag);
    Settle(host);
    double stood_s = 0.0;
    uint64_t others = 0;
    for (uint64_t call = 0; call < 3; ++call) {
      const size_t before = host.predicted();
      const auto waits = [&](int rank) {
        return call == 2 || (call == 1 && std::count(waiting.begin(), waiting.end(), rank) > 0);
      };
      for (uint64_t key = 1; key <= 3; ++key) {
        for (int r = 0; r < 3; ++r) {
          if (!waits(r)) host.Submit(r, report(key, call));
        }
      }
      // All ranks have submitted the calls that do not wait before any chunk is done.
      while (!host.Deliverable().empty()) host.Deliver(host.Deliverable().front());
      for (uint64_t key = 1; key <= 3; ++key) {
        for (int r = 0; r < 3; ++r) {
          if (waits(r)) host.Submit(r, report(key, call));
        }
        Settle(host);
        for (; host.InFlight(waiting[0], report(key, call).id()) && stood_s < 20; stood_s += 0.05) {
          for (int r = 0; r < 3; ++r) host.Submit(r, Of(9, others));
          ++others;
          host.Advance(0.05);
          host.Clock();
          Settle(host);
        }
      }
      for (int r = 0; r < 3; ++r) {
        EXPECT_TRUE(host.failure(r).ok()) << host.failure(r);
        EXPECT_TRUE(host.IsIdle(r)) << host.Describe(r);
        host.EndStep(r);
      }
      Settle(host);
      // The third step is predicted from the second one, and all of it starts ahead.
      if (call == 2) {
        EXPECT_EQ(host.predicted() - before, 3 * 3 * kChunks);
      }
    }
    EXPECT_GT(stood_s, 0.0) << "the order is the one that this test wants";
    EXPECT_LT(stood_s, 2 * AnswerPatience(30.0)) << "once a step";
  }
}

// Returns a host after the first step of tensors 1 to 3. The second step is predicted, and no rank
// has submitted any of it.
Host AfterOneStep(int world, Options options, Matching matching = Matching::kByTag) {
  options.predict = Predict::kAlways;
  Host host(world, options, matching);
  Settle(host);
  for (uint64_t key = 1; key <= 3; ++key) {
    for (int r = 0; r < world; ++r) host.Submit(r, Of(key, 0));
  }
  for (int r = 0; r < world; ++r) host.EndStep(r);
  Settle(host);
  return host;
}

void ExpectInMessage(const absl::Status& status, absl::StatusCode code,
                     const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << " in " << status;
  }
}

// Advances the clock in small steps, until rank 0 has found that something is overdue, and why.
void LetTimePass(Host& host, double seconds) {
  for (double passed = 0.0; passed < seconds; passed += 0.05) {
    host.Advance(0.05);
    host.Clock();
    Settle(host);
  }
}

TEST(Sequencer, APredictedTensorThatOneRankNeverSubmitsIsNamed) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  Host host = AfterOneStep(3, options);
  for (int r = 0; r < 3; ++r) {
    for (uint64_t key = 1; key <= 3; ++key) {
      if (r != 1 || key != 2) host.Submit(r, Of(key, 1));
    }
  }
  Settle(host);
  EXPECT_TRUE(host.failure(0).ok());
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t2'", "rank 1", "never submitted"});
}

// Chunks of tensor 1 hold every predicted lane or, with one order for all ranks, come first. Tensor
// 3, which all ranks have submitted, comes behind them. With one order it waits; otherwise it goes
// on without the prediction.
TEST(Sequencer, ATensorThatHoldsUpAnotherIsNamed) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  options.predicted_lanes = 1;
  options.policy = Policy::kFifo;
  for (const Matching matching : {Matching::kByTag, Matching::kByOrder}) {
    Host host = AfterOneStep(3, options, matching);
    for (int r = 0; r < 3; ++r) host.Submit(r, Of(3, 1));
    host.Advance(0.5);
    for (const int r : {0, 2}) host.Submit(r, Of(1, 1));
    Settle(host);
    EXPECT_FALSE(host.IsIdle(1));
    LetTimePass(host, 0.9);  // tensor 3 is overdue, tensor 1 is not
    if (matching == Matching::kByTag) {
      EXPECT_TRUE(host.failure(0).ok()) << host.failure(0);
      EXPECT_TRUE(host.IsIdle(1));
      continue;
    }
    ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                    {"'t1'", "holds up 't3'", "rank 1", "never submitted"});
  }
}

TEST(Sequencer, RankZeroThatLeavesOutAPredictedTensorFailsAtTheStepsEndWhereAllHaveOneOrder) {
  Host host = AfterOneStep(2, {}, Matching::kByOrder);
  for (const uint64_t key : {1, 3}) host.Submit(0, Of(key, 1));
  EXPECT_TRUE(host.failure(0).ok());
  host.EndStep(0);
  ExpectInMessage(host.failure(0), absl::StatusCode::kFailedPrecondition, {"'t2'", "rank 0"});
}

TEST(Sequencer, APredictedTensorOfAnotherSizeFailsWhereItIsSubmitted) {
  Host host = AfterOneStep(2, {});
  host.Submit(1, Of(1, 1, 2, 4096));
  ExpectInMessage(host.failure(1), absl::StatusCode::kFailedPrecondition,
                  {"'t1'", "4096", "rank 1"});
}

TEST(Sequencer, ASilentLeaderIsNamedByTheOthers) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.Silence(0);
  for (int r = 0; r < 3; ++r) host.Submit(r, Of(1, 0));
  LetTimePass(host, 0.9);
  for (const int r : {1, 2}) EXPECT_TRUE(host.failure(r).ok()) << "rank 0 may still speak";
  LetTimePass(host, 0.2);
  for (const int r : {1, 2}) {
    ExpectInMessage(host.failure(r), absl::StatusCode::kDeadlineExceeded, {"'t1'", "rank 0"});
    EXPECT_EQ(host.silent(r), 1);
  }
}

// Three ranks with a timeout of five seconds, whose exchanges never end.
Host WithoutExchanges() {
  Options options;
  options.timeout = std::chrono::milliseconds(5000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.CutExchanges();
  return host;
}

// Rank 1 was asked before the deadline, so rank 0 need not wait for an answer after that.
TEST(Sequencer, ASilentRankIsNamedAtTheDeadline) {
  for (const bool submits : {true, false}) {
    Host host = WithoutExchanges();
    for (int r = 0; r < 3; ++r) {
      if (r != 1 || submits) host.Submit(r, Of(1, 0));
    }
    Settle(host);
    host.Silence(1);
    LetTimePass(host, 4.9);
    EXPECT_TRUE(host.failure(0).ok());
    LetTimePass(host, 0.15);
    ExpectInMessage(
        host.failure(0), absl::StatusCode::kDeadlineExceeded,
        {"'t1'", submits ? "rank 1 submitted it and then fell silent" : "rank 1 never submitted it",
         "look whether the process is stopped"});
    EXPECT_EQ(host.silent(0), 1);
  }
}

// If rank 0 waited for the next look at the clock, that would add to the timeout.
TEST(Sequencer, RankZeroFailsAsSoonAsItHearsOfAPassedDeadline) {
  Host host = WithoutExchanges();
  host.Silence(1);
  host.Submit(2, Of(1, 0));
  for (int ticks = 0; host.failure(0).ok(); ++ticks) {
    ASSERT_LT(ticks, 200);
    host.Advance(0.05);
    host.Clock();
    EXPECT_TRUE(host.failure(0).ok()) << "it had heard of the deadline before";
    Settle(host);
  }
}

// Rank 0 submits long after the others, and asks them when it learns of their passed deadline.
TEST(Sequencer, WhoAnswersIsNotSilent) {
  Host host = WithoutExchanges();
  for (const int r : {1, 2}) host.Submit(r, Of(1, 0));
  LetTimePass(host, 3.0);
  host.Submit(0, Of(1, 0));
  Settle(host);
  LetTimePass(host, 2.05);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", "all ranks submitted it"});
  EXPECT_EQ(host.silent(0), 0);
}

// Rank 0's deadline is later than rank 2's, whose question makes rank 0 ask the others in time.
TEST(Sequencer, AStoppedRankIsNamedAtTheFirstDeadline) {
  Host host = WithoutExchanges();
  host.Silence(1);
  host.Submit(2, Of(1, 0));
  LetTimePass(host, 3.0);
  host.Submit(0, Of(1, 0));
  Settle(host);
  LetTimePass(host, 1.9);
  EXPECT_TRUE(host.failure(0).ok());
  LetTimePass(host, 0.15);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", "rank 1 never submitted it", "no answer comes from there"});
}

TEST(ControlTree, HeadsOfGroupsStandBetween) {
  const ControlTree lead({0, 10}, 2), head({4, 10}, 2), member({5, 10}, 2), last({9, 10}, 2);
  EXPECT_EQ(lead.children(), (std::vector<int>{1, 2, 3, 4, 8}));
  EXPECT_EQ(head.children(), (std::vector<int>{5, 6, 7}));
  EXPECT_EQ(member.children(), std::vector<int>());
  EXPECT_EQ(member.head(), 4);
  EXPECT_EQ(last.GroupOf(8), (std::vector<int>{8, 9}));
  const ControlTree small({0, 10}, 11);
  EXPECT_EQ(small.children(), std::vector<int>{kEveryone});
}

Options InGroups() {
  Options options;
  options.control_tree_from = 2;
  options.timeout = std::chrono::milliseconds(1000);
  return options;
}

// The group's head has reported nothing to rank 0, not even for the other ranks of the group.
TEST(Sequencer, ARankOfAGroupThatNeverSubmitsIsNamedAlone) {
  Host host(10, InGroups(), Matching::kByTag);
  Settle(host);
  for (int r = 0; r < 10; ++r) {
    if (r != 6) host.Submit(r, Of(1, 0));
  }
  Settle(host);
  for (int r = 0; r < 10; ++r) EXPECT_TRUE(host.Order(r).empty());
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", ": rank 6 never submitted it"});
}

TEST(Sequencer, ASilentHeadIsNamedAlone) {
  Host host(10, InGroups(), Matching::kByTag);
  Settle(host);
  host.Silence(4);
  for (int r = 0; r < 10; ++r) host.Submit(r, Of(1, 0));
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", ": rank 4 never submitted it, ", "look whether the process is stopped"});
}

// Ranks 4 to 7 are one group, ranks 8 and 9 another.
TEST(Sequencer, RanksOfGroupsThatDisagreeAreNamed) {
  for (const int other : {6, 9}) {
    Host host(10, InGroups(), Matching::kByTag);
    Settle(host);
    for (int r = 0; r < 10; ++r) host.Submit(r, Of(1, 0, 1, r == other ? 4096 : 1024));
    Settle(host);
    int failed = 0;
    for (int r = 0; r < 10; ++r) {
      if (host.failure(r).ok()) continue;
      ++failed;
      ExpectInMessage(host.failure(r), absl::StatusCode::kFailedPrecondition,
                      {"'t1'", "4096 elements", "1024 elements", "rank " + std::to_string(other)});
    }
    EXPECT_EQ(failed, 1) << "the head says so, and all hear of it: the engine's duty";
  }
}

// A rank that is slow to finish a raw tensor reports it long after the others have finished.
TEST(Sequencer, LateReportsOfFinishedRawTensorsLeaveNothingBehind) {
  Host host(3, {}, Matching::kByTag);
  Settle(host);
  Report raw = Of(1, 0);
  raw.direct = 1;
  for (int r = 0; r < 3; ++r) host.Submit(r, raw);
  host.Advance(0.2);
  host.Clock();  // all ranks report it, since it is late; the messages are on their way
  host.DirectDone(0, raw.id());
  Settle(host);
  for (const int r : {1, 2}) host.DirectDone(r, raw.id());
  LetTimePass(host, 40.0);
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(host.failure(r).ok()) << host.failure(r);
    EXPECT_EQ(host.Describe(r).find("'t1'"), std::string::npos) << host.Describe(r);
  }
}

}  // namespace
}  // namespace thinwire
