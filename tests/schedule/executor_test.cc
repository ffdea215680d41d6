// Engines over a plane whose exchanges end by events, late and out of order, matched by tag or by
// order: they give the reference's bits, and a plane that stops responding causes a typed error.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <random>

#include "schedule/engine/tensors.h"
#include "tests/effort.h"
#include "tests/leaks.h"
#include "tests/schedule/orderings.h"
#include "tests/schedule/ranks.h"
#include "tests/schedule/reference.h"
#include "tests/transport/late_plane.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

constexpr int kSteps = Steps(4);
constexpr size_t kSizes[] = {1, 257, 1000, 3001, 5000, 9000};
constexpr size_t kTensors = std::size(kSizes);

std::vector<Transport> LateTransports(int world, const LateOptions& late) {
  std::vector<Transport> transports = MakeInProcessTransports(world);
  std::vector<std::unique_ptr<DataPlane>> planes = MakeLatePlanes(world, late);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return transports;
}

// By tensor, then step.
using Results = std::vector<std::vector<std::vector<float>>>;

Results Expected(int world, const Options& options) {
  Results results(kTensors);
  for (size_t t = 0; t < kTensors; ++t) {
    ReferenceAllReduce reference(world, options);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::vector<float>> gradients;
      for (int r = 0; r < world; ++r) gradients.push_back(Gradient(kSizes[t], t, r, step));
      results[t].push_back(reference.Step(gradients, 1.0f / static_cast<float>(world)));
    }
  }
  return results;
}

// Submits a step's tensors in an order that differs by rank and step, and waits for them at the end
// of the step. The reference names all parameters "g", which affects only random draws.
void Train(int rank, Engine& engine, const Results& expected, uint64_t seed) {
  std::mt19937_64 random(seed * 1009 + rank);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<size_t> order(kTensors);
    for (size_t t = 0; t < kTensors; ++t) order[t] = t;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::vector<float>> values(kTensors);
    std::vector<UsePtr> works;
    for (const size_t t : order) {
      values[t] = Gradient(kSizes[t], t, rank, step);
      auto work = engine.Start({.input = View(values[t]),
                                .output = View(values[t]),
                                .key = "t" + std::to_string(t),
                                .priority = static_cast<int>(t)});
      ASSERT_TRUE(work.ok()) << work.status();
      works.push_back(*work);
    }
    engine.EndStep();
    for (const auto& work : works) {
      const absl::Status status = work->Wait();
      ASSERT_TRUE(status.ok()) << status << "\n" << engine.Describe();
    }
    for (size_t t = 0; t < kTensors; ++t) {
      ASSERT_TRUE(values[t] == expected[t][step])
          << "rank " << rank << ", step " << step << ", tensor " << t << ", seed " << seed;
    }
  }
}

class ExecutorTest : public OrderingTest {
 protected:
  Options OptionsOf(const std::string& codec) const {
    Options options = SmallChunks(codec);
    options.predict = predict();
    options.timeout = milliseconds(60000);  // for busy machines
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(All, ExecutorTest, AllOrderings(), OrderingName);

// Returns the process's threads while two engines reduce `numel` elements over such a plane.
size_t ThreadsOver(Matching matching, size_t numel) {
  const Held before = Held::Now();
  size_t threads = 0;
  RunRanks(LateTransports(2, {matching, LateOptions::AtOnce()}), Options(),
           [&](int rank, Engine& engine) {
             std::vector<float> values = Gradient(numel, 1, rank, 0);
             ASSERT_TRUE(AllReduce(engine, values, "first").ok());  // all engines exist
             if (rank == 0) threads = Held::Now().threads;
             ASSERT_TRUE(AllReduce(engine, values, "second").ok());
           });
  Held::Settled(before);
  return threads;
}

// Over a plane that matches by order, small tensors follow the order of chunks.
TEST(DirectThreadTest, IsNotMadeWhereNoTensorUsesIt) {
  constexpr size_t kSmall = 100, kLarge = size_t{2} << 20;
  EXPECT_EQ(ThreadsOver(Matching::kByTag, kSmall), ThreadsOver(Matching::kByOrder, kSmall) + 2);
  EXPECT_EQ(ThreadsOver(Matching::kByTag, kLarge), ThreadsOver(Matching::kByOrder, kLarge));
}

// A plane that matches by order fails the group if ranks issue in different orders, so this test
// also shows that they never do.
TEST_P(ExecutorTest, GivesTheReferencesBitsWhateverEndsFirst) {
  uint64_t seed = 0;
  for (const char* codec : {"fp32", "int4", "topk:density=0.01"}) {
    for (const int world : {2, 3}) {
      for (const Policy policy : {Policy::kFifo, Policy::kP3}) {
        Options options = OptionsOf(codec);
        options.policy = policy;
        const Results expected = Expected(world, options);
        const auto late = LateOptions::OutOfOrder(++seed, milliseconds(3));
        for (const auto& delay : {LateOptions::AtOnce(), late}) {
          std::atomic<uint64_t> predicted = 0;
          RunRanks(LateTransports(world, {matching(), delay}), options,
                   [&](int rank, Engine& engine) {
                     Train(rank, engine, expected, seed);
                     predicted += engine.stats().predicted_chunks;
                   });
          EXPECT_EQ(predicted > 0, options.predict == Predict::kAlways);
        }
      }
    }
  }
}

// Each chunk has four hops.
TEST_P(ExecutorTest, AGridGivesTheReferencesBits) {
  Options options = OptionsOf("int4");
  options.topology = Topology::kGrid;
  const Results expected = Expected(4, options);
  const auto late = LateOptions::OutOfOrder(1, milliseconds(3));
  for (const auto& delay : {LateOptions::AtOnce(), late}) {
    RunRanks(LateTransports(4, {matching(), delay}), options,
             [&](int rank, Engine& engine) { Train(rank, engine, expected, 1); });
  }
}

TEST_P(ExecutorTest, AnyNumberOfLanesGivesTheSameBits) {
  for (const int lanes : {1, 2, 7}) {
    for (const int predicted_lanes : {1, 3}) {
      Options options = OptionsOf("int4");
      options.lanes = lanes;
      options.predicted_lanes = predicted_lanes;
      const Results expected = Expected(3, options);
      const uint64_t seed = 100 + 10 * lanes + predicted_lanes;
      const auto delay = LateOptions::OutOfOrder(seed, milliseconds(2));
      RunRanks(LateTransports(3, {matching(), delay}), options,
               [&](int rank, Engine& engine) { Train(rank, engine, expected, seed); });
    }
  }
}

// Expects every rank's call to end with `code` within the timeout and its grace.
void ExpectEnd(Matching matching, const Options& options, const LateOptions::Delay& delay,
               absl::StatusCode code, const std::function<void(int, Engine&)>& meanwhile) {
  std::barrier all(3);
  RunRanks(LateTransports(3, {matching, delay}), options, [&](int rank, Engine& engine) {
    const auto begin = Clock::now();
    std::vector<std::vector<float>> values(kTensors);
    std::vector<UsePtr> works;
    for (size_t t = 0; t < kTensors; ++t) {
      values[t] = Gradient(kSizes[t], t, rank, 0);
      const std::string key = "t" + std::to_string(t);
      auto work = engine.Start({.input = View(values[t]), .output = View(values[t]), .key = key});
      if (work.ok()) works.push_back(*work);
    }
    meanwhile(rank, engine);
    size_t failed = 0;
    for (const auto& work : works) {
      const absl::Status status = work->Wait();
      failed += status.ok() ? 0 : 1;
      EXPECT_TRUE(status.ok() || status.code() == code) << "rank " << rank << ": " << status;
    }
    EXPECT_GT(failed + kTensors - works.size(), 0u);
    EXPECT_EQ(engine.status().code(), code) << engine.status();
    EXPECT_LT(Clock::now() - begin, options.timeout + std::chrono::seconds(30));
    all.arrive_and_wait();  // else a rank without the reason would see this one as lost
  });
}

TEST_P(ExecutorTest, ExchangesThatNeverEndAreADeadlineOnEveryRank) {
  Options options = OptionsOf("int4");
  options.timeout = milliseconds(600);
  const auto none = [](int, Engine&) {};
  const auto silent = [](int, uint64_t) -> std::optional<Clock::duration> { return std::nullopt; };
  ExpectEnd(matching(), options, silent, absl::StatusCode::kDeadlineExceeded, none);

  // The tag of the second hop of one chunk in the tensor's first call.
  const BucketRequest request{.key = "t4", .numel = kSizes[4]};
  const Bucket bucket(request, {0, 3}, matching(), options);
  const uint64_t tag = HashCombine(bucket.TagOf(bucket.report().id(), 1), 2);
  ExpectEnd(matching(), options, LateOptions::NeverFor({tag}), absl::StatusCode::kDeadlineExceeded,
            none);
}

TEST_P(ExecutorTest, AbortEndsExchangesOnTheirWay) {
  const Options options = OptionsOf("int4");
  const auto silent = [](int, uint64_t) -> std::optional<Clock::duration> { return std::nullopt; };
  ExpectEnd(matching(), options, silent, absl::StatusCode::kAborted, [](int rank, Engine& engine) {
    if (rank == 1) engine.Abort(absl::AbortedError("enough"));
  });
}

}  // namespace
}  // namespace thinwire
