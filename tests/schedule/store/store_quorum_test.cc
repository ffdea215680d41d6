// Rounds with a quorum: the pushes of an update, when it is applied, and which workers are awaited.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "schedule/store/rows.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

// A server whose messages and clock a test controls, with its answers.
class QuorumServer {
 public:
  using Kind = StoreHead::Kind;

  QuorumServer(const std::string& mode, int workers, const std::string& codec = "fp32",
               const std::string& optimizer = "add:lr=1")
      : codec_(CodecPair::Parse(codec).value()),
        server({.workers = workers}, CpuBackend(),
               [this](int worker, int, const StoreHead& head, std::vector<uint8_t> body) {
                 if (head.kind == Kind::kValues) answered.push_back(worker);
                 if (head.kind == Kind::kState && body.size() >= 16 + kElements * 4) {
                   std::memcpy(x.data(), body.data() + 16, kElements * 4);
                 }
               }) {
    const StoreTable table{StoreMode::Parse(mode).value(),
                           codec_,
                           1,
                           {{0, 0, kElements, 0, "w"}, {1, 0, kElements, kWidth, "table"}}};
    for (const uint32_t slice : {0u, 1u}) {
      Send(0, {.kind = Kind::kPut, .slice = slice}, std::vector<uint8_t>(kElements * 4));
    }
    for (const auto& [what, text] : {std::pair(Together::kInit, table.ToString()),
                                     std::pair(Together::kOptimizer, optimizer)}) {
      for (int worker = 0; worker < workers; ++worker) {
        Send(worker, {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = 1},
             {text.begin(), text.end()});
      }
    }
  }

  void Send(int worker, const StoreHead& head, std::vector<uint8_t> body) {
    server.OnMessage(worker, 0, head.ToBytes(), std::move(body), now);
  }
  // Pushes the same gradient for all elements, followed by a pull.
  void Push(int worker, uint64_t number, float gradient, double weight) {
    std::vector<float> g(kElements, gradient);
    std::vector<uint8_t> wire(EncodedBytes(codec_.up, kElements));
    CpuBackend().Encode(codec_.up, View(g), nullptr, wire.data());
    AppendWeight(weight, &wire);
    Send(worker, {.kind = Kind::kPushPull, .number = number, .request = number}, std::move(wire));
  }
  void PushRow(int worker, uint64_t number, uint32_t row, float gradient, double weight) {
    const std::vector<uint32_t> ids = {row};
    std::vector<float> g(kWidth, gradient);
    const size_t bytes = EncodedBytes(LosslessSpec(DType::kF32), kWidth);
    std::vector<uint8_t> body = RowsBody(ids, bytes);
    CpuBackend().Encode(LosslessSpec(DType::kF32), View(g), nullptr,
                        body.data() + body.size() - bytes);
    AppendWeight(weight, &body);
    Send(worker, {.kind = Kind::kPush, .slice = 1, .number = number}, std::move(body));
  }
  void Wait(std::chrono::milliseconds time) {
    now += time;
    for (StoreRecord& ended : server.EndedGraces(now)) {
      ASSERT_TRUE(server.Apply(std::move(ended), now).ok());
    }
    server.OnClock(now);
  }
  const std::vector<float>& Values(uint32_t slice = 0) {
    Send(0, {.kind = Kind::kGet, .slice = slice, .request = 1}, {});
    return x;
  }

  static constexpr size_t kElements = 24, kWidth = 8;
  const CodecPair codec_;
  Deadline now;
  std::vector<int> answered;  // workers whose pulls were answered
  std::vector<float> x = std::vector<float>(kElements);
  StoreServer server;
};

constexpr std::chrono::milliseconds kHalf{250};  // half of the grace below

TEST(QuorumServerTest, ARoundIsTheWeightedMeanOfWhatIsThereWhenTheGraceIsOver) {
  QuorumServer store("sync:quorum=2,grace=0.5", 3);
  store.Push(2, 1, 10.0f, 300);
  store.Wait(4 * kHalf);
  EXPECT_EQ(store.Values()[0], 0.0f) << "one push is no quorum";
  store.Push(0, 1, 2.0f, 100);
  store.Wait(kHalf);
  EXPECT_EQ(store.Values()[0], 0.0f) << "the grace goes on";
  EXPECT_TRUE(store.answered.empty());
  store.Wait(kHalf);
  EXPECT_FLOAT_EQ(store.Values()[7], 8.0f);
  EXPECT_EQ(store.answered, (std::vector<int>{2, 0}));
  // This push is late: it is answered at once, and belongs to the next round.
  store.Push(1, 1, 100.0f, 100);
  EXPECT_EQ(store.answered.back(), 1);
  EXPECT_FLOAT_EQ(store.Values()[0], 8.0f);
  store.Push(0, 2, 0.0f, 100);
  store.Push(1, 2, 0.0f, 100);
  store.Push(2, 2, 0.0f, 100);
  EXPECT_FLOAT_EQ(store.Values()[0], 33.0f);
  EXPECT_TRUE(store.server.failure().ok()) << store.server.failure();
}

TEST(QuorumServerTest, RowsHaveTheWeightsOfTheirPushes) {
  QuorumServer store("sync:quorum=2,grace=0.5", 2);
  store.PushRow(0, 1, 1, 4.0f, 3);
  store.PushRow(1, 1, 1, 8.0f, 1);
  EXPECT_FLOAT_EQ(store.Values(1)[8], 5.0f);
  EXPECT_EQ(store.Values(1)[0], 0.0f);
  store.PushRow(0, 2, 0, 4.0f, 3);
}

TEST(StoreTest, RowsThatArePushedAndPulledInOneMessageHaveTheirWeights) {
  StoreRanks store{.workers = 2, .mode = "sync:quorum=2,grace=5"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> table(32), g(16, kv->rank() == 0 ? 4.0f : 8.0f), out(32);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"rows", View(table), 16}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    const std::vector<int64_t> pushed = {1}, pulled = {1, 0};
    const double weight = kv->rank() == 0 ? 3.0 : 1.0;
    const absl::Status status =
        kv->PushPullRows("rows", {pushed, View(g)}, {pulled, View(out)}, 0, weight);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_FLOAT_EQ(out[0], 5.0f);
    EXPECT_EQ(out[16], 0.0f);
    EXPECT_TRUE(absl::IsInvalidArgument(
        kv->PushPullRows("rows", {pushed, View(g)}, {pulled, View(out)}, 0, -1.0)));
  });
}

// A run without late pushes can so be checked against sync.
TEST(QuorumServerTest, WithAllPushesOfOneWeightTheBitsAreThoseOfSync) {
  for (const char* const codec : {"fp32", "int4", "bf16"}) {
    std::vector<float> values[2];
    for (const bool has_quorum : {false, true}) {
      StoreRanks store{
          .workers = 3, .mode = has_quorum ? "sync:quorum=3,grace=1" : "sync", .codec = codec};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        std::vector<float> w = Normal(5000, 1);
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
        const float third = 1.0f / 3.0f;
        ASSERT_TRUE(
            kv->SetOptimizer(has_quorum
                                 ? "sgd:lr=0.1,momentum=0.9"
                                 : absl::StrFormat("sgd:lr=0.1,momentum=0.9,rescale=%.9g", third))
                .ok());
        for (uint64_t step = 0; step < 10; ++step) {
          std::vector<float> g = Normal(w.size(), 100 * step + static_cast<uint64_t>(kv->rank()));
          const double weight = has_quorum ? 512.0 : 1.0;
          ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0, weight).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
        }
        if (kv->rank() == 0) values[has_quorum] = w;
      });
    }
    EXPECT_EQ(values[0], values[1]) << codec;
  }
}

TEST(QuorumServerTest, ALateQuorumStartsItsOwnGraceAndTheTimeoutNamesWhoIsMissing) {
  QuorumServer store("sync:quorum=2,grace=0.5", 3);
  store.Push(0, 1, 1.0f, 1);
  store.Push(1, 1, 1.0f, 1);
  store.Push(2, 1, 1.0f, 1);  // all pushes: applied at once, before the grace ends
  store.Wait(kHalf);
  store.Push(0, 2, 1.0f, 1);
  store.Push(1, 2, 1.0f, 1);
  store.Wait(kHalf + kHalf / 2);  // the first round's grace would end here
  EXPECT_FLOAT_EQ(store.Values()[0], 1.0f);
  store.Wait(kHalf);
  EXPECT_FLOAT_EQ(store.Values()[0], 2.0f);
  store.Push(0, 3, 1.0f, 1);
  store.Wait(std::chrono::milliseconds(59'000));
  ASSERT_TRUE(store.server.failure().ok()) << store.server.failure();
  store.Wait(std::chrono::milliseconds(2'000));
  EXPECT_TRUE(absl::IsDeadlineExceeded(store.server.failure())) << store.server.failure();
  EXPECT_NE(store.server.failure().message().find("workers 1, 2"), std::string::npos)
      << store.server.failure();
}

TEST(QuorumServerTest, RoundsGoOnWhileAQuorumIsLeft) {
  QuorumServer store("sync:quorum=2,grace=0.5", 4);
  store.Push(3, 1, 50.0f, 1);
  store.server.OnLost(3, absl::UnavailableError("it was killed"), store.now);
  store.Push(0, 1, 1.0f, 1);
  store.Push(1, 1, 1.0f, 1);
  store.server.OnLost(2, absl::UnavailableError("it was killed"), store.now);
  ASSERT_TRUE(store.server.failure().ok()) << store.server.failure();
  EXPECT_FLOAT_EQ(store.Values()[0], 1.0f);
  store.Push(0, 2, 1.0f, 1);
  store.server.OnLost(1, absl::UnavailableError("it was killed"), store.now);
  EXPECT_TRUE(absl::IsUnavailable(store.server.failure())) << store.server.failure();
  EXPECT_NE(store.server.failure().message().find("worker 1 was lost, and 1 are left"),
            std::string::npos)
      << store.server.failure();
}

TEST(QuorumServerTest, AWeightThatCanNotBeIsAnErrorThatNamesWorkerAndKey) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const double weight : {0.0, -1.0, nan, inf, -inf}) {
    QuorumServer store("sync:quorum=1,grace=0", 2);
    store.Push(1, 1, 1.0f, weight);
    const absl::Status& failure = store.server.failure();
    EXPECT_TRUE(absl::IsInvalidArgument(failure)) << failure;
    EXPECT_NE(failure.message().find("key 'w', push 1 of worker 1: its weight is"),
              std::string::npos)
        << failure;
  }
  QuorumServer store("sync:quorum=1,grace=0", 2);
  store.Send(1, {.kind = StoreHead::Kind::kPushPull, .number = 1, .request = 1}, {1, 2, 3});
  EXPECT_TRUE(absl::IsInvalidArgument(store.server.failure())) << store.server.failure();
  // The worker refuses the weight before it sends anything, and the store goes on.
  for (const char* const mode : {"sync", "sync:quorum=1,grace=0"}) {
    StoreRanks ranks{.workers = 1, .mode = mode};
    ranks.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10), g(10, 1.0f), rows(32);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"rows", View(rows), 16}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      for (const double weight : {0.0, -1.0, nan, inf, 2.0}) {
        const bool is_right = weight == 2.0 && std::string(mode) != "sync";
        const absl::Status pushed = kv->PushPull("w", View(g), View(w), 0, weight);
        EXPECT_EQ(pushed.ok(), is_right) << mode << " " << weight;
        if (is_right) continue;
        EXPECT_TRUE(absl::IsInvalidArgument(pushed)) << pushed;
        EXPECT_NE(pushed.message().find("worker 0: key 'w', a push: its weight is"),
                  std::string::npos)
            << pushed;
        EXPECT_TRUE(absl::IsInvalidArgument(
            kv->PushRows("rows", std::vector<int64_t>{0}, View(rows).Slice(0, 16), 0, weight)));
      }
      ASSERT_TRUE(kv->WaitAll().ok());
    });
  }
}

TEST(StoreTest, AQuorumOfMoreWorkersOrAGraceBeyondTheTimeoutIsRefused) {
  for (const char* const mode : {"sync:quorum=3,grace=1", "sync:quorum=2,grace=20"}) {
    StoreRanks store{.workers = 2};
    StoreWorker::Options options = store.WorkerOptions();
    options.mode = StoreMode::Parse(mode).value();
    const auto refused = StoreWorker::Create(store.WorkerPlane(0), options);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    EXPECT_NE(refused.status().message().find(mode), std::string::npos) << refused.status();
  }
}

// Worker 2 is slow, and the others finish rounds without it. All its pushes count.
TEST(StoreTest, ASlowWorkerStopsNobodyBeyondTheGraceWithAQuorum) {
  StoreRanks store{.workers = 3, .mode = "sync:quorum=2,grace=0.01"};
  absl::Mutex mu;
  int applied = 0, ahead = 0;
  std::set<uint64_t> rounds;
  store.trace = [&](const StoreTrace& event) {
    const absl::MutexLock lock(&mu);
    if (event.kind != StoreTrace::Kind::kApplied) return;
    ++applied;
    rounds.insert(event.version);
  };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), g(10, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    for (int step = 0; step < (kv->rank() == 2 ? 4 : 20); ++step) {
      if (kv->rank() == 2) {  // waits for five more rounds of the others
        const absl::MutexLock lock(&mu);
        const int bound = 5 * (step + 1);
        const auto done = [&] { return ahead >= bound; };
        ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&done), absl::Seconds(60)));
      }
      ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0, 1.0 + kv->rank()).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      if (kv->rank() == 0) {
        const absl::MutexLock lock(&mu);
        ahead = step + 1;
      }
    }
    ASSERT_TRUE(kv->Barrier().ok());
    ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    const absl::MutexLock lock(&mu);
    EXPECT_EQ(applied, 44);
    EXPECT_EQ(w[0], static_cast<float>(rounds.size()));
    EXPECT_GE(rounds.size(), 20u);
  });
}

}  // namespace
}  // namespace thinwire
