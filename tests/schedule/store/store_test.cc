// Workers and servers of the store on the in-process plane: what is pulled, bytes, faults, state.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "schedule/digest.h"
#include "schedule/store/rows.h"
#include "tests/effort.h"
#include "tests/own_folder.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

uint64_t DigestOf(const std::vector<float>& values) {
  return DigestBytes({reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
}

// The checks that MXNet publishes for dist_sync (tests/nightly/dist_sync_kvstore.py,
// check_default_keys): ones times rank + 1, pushed n times by an optimizer that adds rate times
// the sum, leave exactly 1 + (workers + 1) * workers * rate / 2 * n. The values are small integers,
// so there is no rounding.
TEST(StoreTest, HoldsMxnetsChecksOfDistSync) {
  for (const int workers : {2, 4, 7}) {
    for (const int servers : {1, 2, 3}) {
      if (kSanitized && (workers == 4 || servers == 1)) continue;
      StoreRanks store{.workers = workers, .servers = servers};
      store.slice_elements = 256 << 10;
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        const size_t small = 2 * 3, big = 1200 * 1100;
        std::vector<float> one(small, 1.0f), many(big, 1.0f);
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"3", View(one)}}).ok());
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"99", View(many)}}).ok());
        const float rate = 2;
        ASSERT_TRUE(kv->SetOptimizer("add:lr=1,rescale=2").ok());
        for (int repeat = 0; repeat < 3; ++repeat) {
          for (auto* const key : {&one, &many}) {
            const std::string name = key == &one ? "3" : "99";
            std::vector<float> push(key->size(), static_cast<float>(kv->rank() + 1));
            ASSERT_TRUE(kv->Push(name, View(push), 0).ok());
            ASSERT_TRUE(kv->Pull(name, View(*key), 0).ok());
            const absl::Status waited = kv->Wait(name);
            ASSERT_TRUE(waited.ok()) << waited;
            const float expected =
                static_cast<float>((workers + 1) * workers) * rate / 2 * (repeat + 1) + 1;
            ASSERT_TRUE(std::ranges::count(*key, expected) == std::ssize(*key)) << name;
          }
        }
      });
    }
  }
}

// The checks that MXNet publishes of its compression in the same file (test_sync_2bit_compression,
// with compute_expected_2bit_quantization): values are sums of the thresholds that were sent.
TEST(StoreTest, MxnetsChecksOfTwoBitCompressionHold) {
  for (const int workers : {2, 4}) {
    for (const int servers : {1, 2}) {
      StoreRanks store{.workers = workers, .servers = servers};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        const float rate = 2, threshold = 0.5f;
        // Keys that are there keep their codec.
        std::vector<float> exact(5000);
        float exact_sum = 0;
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"exact", View(exact)}}).ok());
        const auto codec = CodecPair::Parse("ternary:threshold=0.5,down=fp32");
        ASSERT_TRUE(kv->SetCodec(*codec).ok());
        const float sent = rate * threshold * static_cast<float>(workers);
        ASSERT_TRUE(kv->SetOptimizer("add:lr=1,rescale=2").ok());
        for (const size_t numel : {2 * 3, 121 * 121, 120 * 120}) {
          const std::string name = std::to_string(numel), other = name + " at random";
          std::vector<float> w(numel), ones(numel, 1.0f), g(numel);
          ASSERT_TRUE(
              kv->Init(std::vector<StoreWorker::Value>{{name, View(w)}, {other, View(ones)}}).ok());
          const auto pull = [&](const std::string& key) {
            std::vector<float> out(numel, -7.0f);
            EXPECT_TRUE(kv->Pull(key, View(out), 0).ok());
            EXPECT_TRUE(kv->Wait(key).ok());
            return out;
          };
          const auto is_all = [&](const std::vector<float>& values, float expected) {
            return std::ranges::count(values, expected) == std::ssize(values);
          };
          ASSERT_TRUE(is_all(pull(name), 0));
          ASSERT_TRUE(is_all(pull(other), 1)) << "an init is not compressed";
          // What is pushed, and how many thresholds of each worker the value then has.
          const std::pair<float, int> pushes[] = {
              {0, 0},   {0.4f, 0},      {threshold - 0.4f, 1}, {0.2f, 1}, {threshold - 0.2f, 2},
              {0.5, 3}, {-threshold, 2}};
          for (const auto& [value, times] : pushes) {
            std::fill(g.begin(), g.end(), value);
            ASSERT_TRUE(kv->Push(name, View(g), 0).ok());
            ASSERT_TRUE(is_all(pull(name), sent * static_cast<float>(times))) << value;
          }
          std::fill(exact.begin(), exact.end(), 0.25f);
          ASSERT_TRUE(kv->PushPull("exact", View(exact), View(exact), 0).ok());
          ASSERT_TRUE(kv->Wait("exact").ok());
          exact_sum += 0.25f * rate * static_cast<float>(workers);
          ASSERT_TRUE(is_all(exact, exact_sum));
          // All workers push the same, so that each knows what is pulled.
          std::vector<float> residual(numel), value = ones;
          for (int step = 0; step < 7; ++step) {
            g = Normal(numel, step, 0.5f);
            ASSERT_TRUE(kv->Push(other, View(g), 0).ok());
            for (size_t i = 0; i < numel; ++i) {
              residual[i] += g[i];
              const float of_one = residual[i] >= threshold    ? threshold
                                   : residual[i] <= -threshold ? -threshold
                                                               : 0.0f;
              residual[i] -= of_one;
              value[i] += of_one * static_cast<float>(workers) * rate;
            }
            ASSERT_EQ(pull(other), value) << "step " << step;
          }
        }
      });
    }
  }
}

TEST(StoreTest, AnInitTakesWorkerZerosValuesExactly) {
  StoreRanks store{.workers = 3, .servers = 2, .codec = "int4"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> mine = Normal(10000, kv->rank()), out(10000);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(mine)}}).ok());
    ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(out, Normal(10000, 0));
  });
}

// Without an optimizer a pull is the sum of the step's pushes, in rank order, as in an allreduce.
TEST(StoreTest, Fp32SumsInRankOrder) {
  for (const int workers : {2, 3, 4}) {
    StoreRanks store{.workers = workers, .servers = 2};
    const size_t n = 20000;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> out(n);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"g", View(out)}}).ok());
      for (uint64_t step = 0; step < 5; ++step) {
        std::vector<float> mine = Normal(n, step * 10 + kv->rank());
        ASSERT_TRUE(kv->PushPull("g", View(mine), View(out), 0).ok());
        ASSERT_TRUE(kv->Wait("g").ok());
        std::vector<float> sum = Normal(n, step * 10);
        for (int rank = 1; rank < workers; ++rank) {
          const std::vector<float> other = Normal(n, step * 10 + rank);
          for (size_t i = 0; i < n; ++i) sum[i] += other[i];
        }
        ASSERT_EQ(out, sum) << workers << " workers, step " << step;
      }
    });
  }
}

// Whatever arrives first: all workers and all runs have the same bits.
TEST(StoreTest, ManyInt4StepsInAnyOrderHaveOneDigest) {
  std::set<uint64_t> digests;
  for (int run = 0; run < 3; ++run) {
    StoreRanks store{.workers = 3, .servers = 2, .codec = "int4"};
    absl::Mutex mu;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      const size_t n = 9000;
      std::mt19937_64 random(run * 100 + kv->rank());
      std::vector<float> out = Normal(n, 1), other = Normal(300, 2);
      ASSERT_TRUE(
          kv->Init(std::vector<StoreWorker::Value>{{"w", View(out)}, {"b", View(other)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.01,momentum=0.9").ok());
      for (uint64_t step = 0; step < 1000; ++step) {
        std::vector<float> a = Normal(n, step * 16 + kv->rank());
        std::vector<float> b = Normal(300, step * 16 + 8 + kv->rank());
        if (random() % 2 == 0) {
          ASSERT_TRUE(kv->PushPull("w", View(a), View(out), 0).ok());
          ASSERT_TRUE(kv->PushPull("b", View(b), View(other), random() % 3).ok());
        } else {
          ASSERT_TRUE(kv->Push("b", View(b), 0).ok());
          ASSERT_TRUE(kv->Push("w", View(a), random() % 3).ok());
          ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
          ASSERT_TRUE(kv->Pull("b", View(other), 5).ok());
        }
        if (random() % 4 == 0) std::this_thread::yield();
        ASSERT_TRUE(kv->WaitAll().ok());
      }
      out.insert(out.end(), other.begin(), other.end());
      const absl::MutexLock lock(&mu);
      digests.insert(DigestOf(out));
    });
  }
  EXPECT_EQ(digests.size(), 1u);
}

// Up, a push is its encoded elements; down, a pull is one encoded difference in sync, and in async
// on average, where a worker takes as many as were published since its last pull.
TEST(StoreTest, BytesOfInt4EachWayAreTheFormula) {
  for (const char* const mode : {"sync", "async", "ssp:staleness=2"}) {
    StoreRanks store{.workers = 2, .servers = 2, .mode = mode, .codec = "int4"};
    store.slice_elements = 256 << 10;
    const size_t n = 1 << 20;
    const int steps = 12;
    std::vector<uint64_t> up(2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> out(n), mine = Normal(n, kv->rank());
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(out)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.01").ok());
      ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      ASSERT_TRUE(kv->Barrier().ok());
      const uint64_t before = kv->bytes_sent();
      for (int step = 0; step < steps; ++step) {
        ASSERT_TRUE(kv->PushPull("w", View(mine), View(out), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
      }
      up[kv->rank()] = kv->bytes_sent() - before;
    });
    const size_t formula = EncodedBytes(CodecSpec::Parse("int4").value(), n) * steps;
    for (const uint64_t bytes : up) EXPECT_LE(bytes, formula * 1.02) << mode;
    const uint64_t anchors = 2 * n * sizeof(float);  // of the first pulls
    const uint64_t down = store.server_bytes[0] + store.server_bytes[1] - anchors;
    EXPECT_LE(down, 2 * formula * 1.02) << mode;
    EXPECT_GT(down, formula) << mode;  // and values did come
  }
}

TEST(StoreTest, EveryCodecTrainsInEveryMode) {
  for (const char* const mode : {"sync", "async", "ssp:staleness=1"}) {
    for (const char* const codec :
         {"fp32", "bf16", "int8", "int4", "int4:hadamard=1", "int8:rounding=stochastic",
          "adaptive:bits=2", "topk:density=0.05", "int4:down=fp32", "int8:down=int4",
          "ternary:threshold=1"}) {
      StoreRanks store{.workers = 3, .servers = 2, .mode = mode, .codec = codec};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        // The gradient of |w - target|^2 / 2, seen with noise.
        const size_t n = 5000, steps = 150;
        const std::vector<float> noise = Normal(n + steps, kv->rank());
        std::vector<float> w(n, 0.0f), target = Normal(n, 77), g(n);
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
        ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.05").ok());
        ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
        for (size_t step = 0; step < steps; ++step) {
          for (size_t i = 0; i < n; ++i) g[i] = w[i] - target[i] + 0.1f * noise[i + step];
          ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
          const absl::Status waited = kv->WaitAll();
          ASSERT_TRUE(waited.ok()) << waited;
        }
        ASSERT_TRUE(kv->Barrier().ok());
        ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
        double error = 0, norm = 0;
        for (size_t i = 0; i < n; ++i) {
          error += (w[i] - target[i]) * (w[i] - target[i]);
          norm += target[i] * target[i];
        }
        EXPECT_LT(error / norm, 0.02) << mode << " " << codec;
      });
    }
  }
}

TEST(StoreTest, ASlowWorkerStopsNobodyInAsyncAndTheBoundHoldsInSsp) {
  for (const char* const mode : {"async", "ssp:staleness=2"}) {
    StoreRanks store{.workers = 2, .mode = mode};
    absl::Mutex mu;
    int slow = 0, ahead = 0;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10), g(10, 1.0f);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      for (int step = 0; step < 40; ++step) {
        if (kv->rank() == 1) {
          // Until the fast one is done (async), or has come as far as it may.
          const absl::MutexLock lock(&mu);
          const int bound = std::string(mode) == "async" ? 40 : std::min(40, 4 * (step + 1));
          const auto done = [&] { return ahead >= bound; };
          ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&done), absl::Seconds(60)))
              << mode << ": the fast worker came to step " << ahead << " at " << step;
          slow = step;
        }
        ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
        if (kv->rank() == 0) {
          const absl::MutexLock lock(&mu);
          ahead = step + 1;
        }
      }
      ASSERT_TRUE(kv->Barrier().ok());
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(w[0], 80.0f) << mode;  // every push once
    });
  }
}

// A pull that is answered while its worker is in a barrier would have the others wait for a push
// that does not come.
TEST(StoreTest, ABarrierWithPullsUnderWayStopsNobodyInSsp) {
  StoreRanks store{.workers = 2, .mode = "ssp:staleness=1"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), g(10, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    const int steps = kv->rank() == 0 ? 3 : 12;
    for (int step = 0; step < steps; ++step) {
      ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
      if (kv->rank() == 0 && step == steps - 1) break;
      const absl::Status waited = kv->WaitAll();
      ASSERT_TRUE(waited.ok()) << waited;
    }
    const absl::Status met = kv->Barrier();
    ASSERT_TRUE(met.ok()) << met;
    ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(w[0], 15.0f);
  });
}

TEST(StoreTest, AHeldPushCountsWhenItsWorkerCloses) {
  StoreRanks store{.workers = 2, .mode = "ssp:staleness=1"};
  absl::Notification has_closed;
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), g(10, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    if (kv->rank() == 0) {
      for (int step = 0; step < 2; ++step) {
        ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
      }
      ASSERT_TRUE(kv->Push("w", View(g), 0).ok());  // held for the other's gradient
      kv.reset();
      has_closed.Notify();
      return;
    }
    ASSERT_TRUE(has_closed.WaitForNotificationWithTimeout(absl::Seconds(60)));
    ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    ASSERT_TRUE(kv->Barrier().ok());
    ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(w[0], 4.0f);
  });
}

TEST(StoreTest, ALostWorkerIsAnErrorOnAllInSync) {
  StoreRanks store{.workers = 3, .servers = 2};
  store.timeout = std::chrono::seconds(60);  // which nothing here waits for
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10000), g(10000);
    const absl::Status set_up = kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}});
    if (kv->rank() == 1) return;
    if (!set_up.ok()) {  // one server's failure came before the other's answer
      EXPECT_TRUE(absl::IsUnavailable(set_up)) << set_up;
      EXPECT_NE(set_up.message().find("worker 1"), std::string::npos) << set_up;
      return;
    }
    const auto start = Clock::now();
    const absl::Status pushed = kv->PushPull("w", View(g), View(w), 0);
    const absl::Status waited = pushed.ok() ? kv->WaitAll() : pushed;
    EXPECT_TRUE(absl::IsUnavailable(waited)) << waited;
    EXPECT_NE(waited.message().find("worker 1"), std::string::npos) << waited;
    EXPECT_LT(Clock::now() - start, store.timeout);
    EXPECT_TRUE(absl::IsUnavailable(kv->Barrier()));  // sticky
  });
  EXPECT_TRUE(absl::IsUnavailable(store.served[0])) << store.served[0];
}

// A killed worker drops its plane without a word, half-way through a step.
TEST(StoreTest, AKilledWorkerEndsSyncAndIsLeftBehindInAsync) {
  for (const char* const mode :
       {"sync", "async", "ssp:staleness=1", "sync:quorum=2,grace=0.01", "sync:quorum=3,grace=9"}) {
    const bool ends = std::string(mode) == "sync" || std::string(mode) == "sync:quorum=3,grace=9";
    const bool has_rounds = std::string(mode) == "sync:quorum=2,grace=0.01";
    StoreRanks store{.workers = 3, .servers = 2, .mode = mode};
    absl::Barrier* const met = new absl::Barrier(3);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000), g(10000, 1.0f);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      if (met->Block()) delete met;
      if (kv->rank() == 2) {
        // A member of the same rank takes its place and dies: peers lose both without a goodbye.
        store.WorkerPlane(2).reset();
        return;
      }
      absl::Status status;
      for (int step = 0; step < 20 && status.ok(); ++step) {
        status = kv->PushPull("w", View(g), View(w), 0);
        if (status.ok()) status = kv->WaitAll();
      }
      if (ends) {
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        EXPECT_NE(status.message().find("worker 2"), std::string::npos) << status;
        return;
      }
      ASSERT_TRUE(status.ok()) << mode << status;
      ASSERT_TRUE(kv->Barrier().ok());
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      if (has_rounds) {
        EXPECT_GE(w[0], 20.0f) << mode;
        EXPECT_LE(w[0], 40.0f) << mode;
      } else {
        EXPECT_EQ(w[0], 40.0f) << mode;
      }
    });
  }
}

// Workers whose process was killed and started again, and ones that come under new numbers, while
// the others push without a pause. They set up as at the start, and get the values of now.
TEST(StoreTest, WorkersJoinARunningStoreInAsyncAndSsp) {
  for (const char* const mode : {"async", "ssp:staleness=1"}) {
    for (const char* const codec : {"fp32", "int8"}) {
      SCOPED_TRACE(absl::StrCat(mode, " ", codec));
      StoreRanks store{.workers = 2, .servers = 2, .mode = mode, .codec = codec};
      constexpr int kLives = 3;  // of worker 1, and workers 2, 3, ...
      std::atomic<int> pushed = 0, begun = 0;
      absl::Notification is_over;
      const auto begin = [](StoreWorker& kv, std::vector<float>& w, std::vector<float>& rows) {
        const absl::Status set_up = kv.Init(std::vector<StoreWorker::Value>{{"w", View(w)}});
        ASSERT_TRUE(set_up.ok()) << set_up;
        ASSERT_TRUE(kv.Init(std::vector<StoreWorker::Value>{{"rows", View(rows), 16}}).ok());
        ASSERT_TRUE(kv.SetOptimizer("add:lr=1").ok());
        ASSERT_TRUE(kv.Barrier().ok());
        ASSERT_TRUE(kv.Pull("w", View(w), 0).ok());
        ASSERT_TRUE(kv.WaitAll().ok());
      };
      const auto step = [&](StoreWorker& kv, std::vector<float>& w) {
        std::vector<float> g(w.size(), 1.0f);
        ++begun;
        absl::Status status = kv.PushPull("w", View(g), View(w), 0);
        if (status.ok()) status = kv.WaitAll();
        ASSERT_TRUE(status.ok()) << status;
        ++pushed;
      };
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        std::vector<float> w(10000, 5.0f), rows(64 * 16);
        EXPECT_FALSE(kv->has_joined());
        begin(*kv, w, rows);
        if (kv->rank() == 0) {
          while (!is_over.HasBeenNotified()) step(*kv, w);
          ASSERT_TRUE(kv->SetOptimizer("add:lr=0.5").ok());  // with all that have joined
          ASSERT_TRUE(kv->Barrier().ok());
          ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
          // Every push counts once; that of a killed worker perhaps.
          const float rounded = std::round(w[0]);
          EXPECT_GE(rounded, 5.0f + static_cast<float>(pushed));
          EXPECT_LE(rounded, 5.0f + static_cast<float>(begun));
          return;
        }
        for (int i = 0; i < 5; ++i) step(*kv, w);
        std::vector<std::unique_ptr<StoreWorker>> late;
        for (int life = 0; life < 2 * kLives; ++life) {
          const int number = life < kLives ? 1 : 2 + life - kLives;
          if (life < kLives) {  // dies with a push under way
            std::vector<float> g(w.size(), 1.0f);
            ++begun;
            ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
            JoinMessageHub(store.hub, 1, {}).reset();
            kv.reset();
          }
          auto joined = StoreWorker::Create(store.WorkerPlane(number), store.WorkerOptions());
          ASSERT_TRUE(joined.ok()) << joined.status();
          EXPECT_TRUE((*joined)->has_joined());
          EXPECT_EQ((*joined)->rank(), number);
          const int before = pushed;
          std::fill(w.begin(), w.end(), -1.0f);
          begin(**joined, w, rows);
          EXPECT_GE(w[0], 5.0f + static_cast<float>(before) - 4);  // pushes that are not published
          for (int i = 0; i < 5; ++i) step(**joined, w);
          if (life >= kLives - 1) {  // nobody waits for those that compute nothing
            std::vector<float> g(w.size());
            ASSERT_TRUE((*joined)->Push("w", View(g), 0).ok());
          }
          (life < kLives ? kv : late.emplace_back()) = *std::move(joined);
        }
        is_over.Notify();
        std::vector<std::thread> threads;
        late.push_back(std::move(kv));
        for (auto& worker : late) {
          threads.emplace_back([&] {
            EXPECT_TRUE(worker->SetOptimizer("add:lr=0.5").ok());
            EXPECT_TRUE(worker->Barrier().ok());
            worker.reset();
          });
        }
        for (std::thread& thread : threads) thread.join();
      });
      for (int server = 0; server < 2; ++server) {
        EXPECT_TRUE(store.served[server].ok()) << store.served[server];
      }
    }
  }
}

// Looks at what servers did: no gradient is applied that is older than staleness * workers updates,
// counted from the pull that it was computed of.
struct AgeChecker {
  struct Pulled {
    uint64_t version = 0, workers = 0;
  };
  AgeChecker(uint64_t staleness, uint64_t workers) : staleness(staleness), workers(workers) {}

  const uint64_t staleness, workers;  // of the start
  absl::Mutex mu;
  std::map<std::pair<uint32_t, int>, Pulled> last;  // by slice and worker
  uint64_t applied = 0, oldest = 0, too_old = 0;

  void Take(const StoreTrace& event) {
    const absl::MutexLock lock(&mu);
    Pulled& pulled =
        last.try_emplace({event.slice, event.worker}, Pulled{.workers = workers}).first->second;
    if (event.kind == StoreTrace::Kind::kPulled) {
      pulled = {event.version, event.workers};
      return;
    }
    const uint64_t age = event.version - pulled.version;
    ++applied;
    oldest = std::max(oldest, age);
    if (age > staleness * pulled.workers) ++too_old;
  }
};

// Workers of unequal speeds, of which one comes back again and again after it was killed, and one
// joins.
void RunUnequalWorkers(const std::string& mode, AgeChecker& checker) {
  StoreRanks store{.workers = 4, .servers = 2, .mode = mode};
  store.trace = [&](const StoreTrace& event) { checker.Take(event); };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::mt19937_64 random(static_cast<uint64_t>(kv->rank()));
    const auto life = [&](StoreWorker& worker, int steps) {
      std::vector<float> w(20000), g(20000, 1.0f);
      ASSERT_TRUE(worker.Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(worker.SetOptimizer("add:lr=1").ok());
      ASSERT_TRUE(worker.Pull("w", View(w), 0).ok());
      for (int step = 0; step < steps; ++step) {
        ASSERT_TRUE(worker.WaitAll().ok());
        if (worker.rank() == 0) absl::SleepFor(absl::Milliseconds(10));
        if (worker.rank() == 1 && random() % 10 == 0) absl::SleepFor(absl::Milliseconds(20));
        const absl::Status pushed = worker.PushPull("w", View(g), View(w), 0);
        ASSERT_TRUE(pushed.ok()) << pushed;
      }
      ASSERT_TRUE(worker.WaitAll().ok());
    };
    if (kv->rank() == 3) {
      for (int lives = 0; lives < 4; ++lives) {
        life(*kv, 15);
        JoinMessageHub(store.hub, 3, {}).reset();
        kv.reset();
        auto again = StoreWorker::Create(store.WorkerPlane(3), store.WorkerOptions());
        ASSERT_TRUE(again.ok()) << again.status();
        kv = *std::move(again);
      }
      auto later = StoreWorker::Create(store.WorkerPlane(4), store.WorkerOptions());
      ASSERT_TRUE(later.ok()) << later.status();
      life(**later, 15);
      return;
    }
    life(*kv, kv->rank() == 0 ? 40 : 200);
  });
}

TEST(StoreTest, NoGradientIsOlderThanTheBoundInSsp) {
  for (const uint64_t staleness : {1, 2}) {
    AgeChecker checker(staleness, 4);
    RunUnequalWorkers(absl::StrCat("ssp:staleness=", staleness), checker);
    EXPECT_EQ(checker.too_old, 0u) << "the oldest was " << checker.oldest << " updates old";
    EXPECT_GT(checker.applied, 5 * 400u);
    EXPECT_GT(checker.oldest, staleness * 2) << "nothing came near the bound";
  }
  AgeChecker checker(1, 4);
  RunUnequalWorkers("async", checker);
  EXPECT_GT(checker.too_old, 0u) << "without the bound the checker sees what breaks it";
}

// The store of others stays as it is.
TEST(StoreTest, AWorkerThatJoinsWithOtherKeysIsRefusedAlone) {
  StoreRanks store{.workers = 2, .mode = "async"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(100), g(100, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    if (kv->rank() == 1) {
      const auto join = [&](const std::string& key, const std::string& optimizer) {
        auto joined = StoreWorker::Create(store.WorkerPlane(2), store.WorkerOptions());
        EXPECT_TRUE(joined.ok()) << joined.status();
        absl::Status status = (*joined)->Init(std::vector<StoreWorker::Value>{{key, View(w)}});
        return status.ok() ? (*joined)->SetOptimizer(optimizer) : status;
      };
      for (const auto& [key, optimizer] :
           {std::pair("v", "add:lr=1"), std::pair("w", "adam:lr=0.1")}) {
        const absl::Status refused = join(key, optimizer);
        EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
        EXPECT_NE(refused.message().find("worker 2 can't join"), std::string::npos) << refused;
      }
      EXPECT_TRUE(join("w", "add:lr=0.01").ok());  // the store's rate stays
    }
    ASSERT_TRUE(kv->Barrier().ok());
    ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    ASSERT_TRUE(kv->Barrier().ok());
    ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(w[0], 2.0f);
  });
}

TEST(StoreTest, NobodyJoinsInSyncAndTheOthersGoOn) {
  StoreRanks store{.workers = 2};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(100), g(100, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    if (kv->rank() == 1) {
      const absl::Status refused =
          StoreWorker::Create(store.WorkerPlane(2), store.WorkerOptions()).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
      for (const char* const word : {"worker 2", "mode sync", "take mode async or ssp"}) {
        EXPECT_NE(refused.message().find(word), std::string::npos) << refused;
      }
    }
    ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(w[0], 2.0f);
  });
}

// Those who were all killed at once, as on a machine that failed.
TEST(StoreTest, AServerWaitsForWorkersThatWereKilledAndEndsWithThoseThatClose) {
  StoreRanks store{.workers = 1, .mode = "async"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(100), g(100, 1.0f);
    for (float pushes = 0; pushes < 3; ++pushes) {
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(w[0], pushes);
      ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      JoinMessageHub(store.hub, 0, {}).reset();
      auto again = StoreWorker::Create(store.WorkerPlane(0), store.WorkerOptions());
      ASSERT_TRUE(again.ok()) << again.status();
      kv = *std::move(again);
    }
  });
  EXPECT_TRUE(store.served[0].ok()) << store.served[0];
}

// The fast worker takes what the slow ones do not, and what one that is lost has not applied.
TEST(StoreTest, WorkGoesToWhoeverAsksAndBackFromTheLost) {
  for (const char* const mode : {"async", "ssp:staleness=1"}) {
    StoreRanks store{.workers = 3, .servers = 2, .mode = mode};
    constexpr WorkPlan kPlan{.samples = 100, .batch = 8, .epochs = 2};
    absl::Mutex mu;
    std::map<std::pair<uint64_t, uint64_t>, int> times;  // by epoch and sample
    int by_worker[3] = {};
    absl::Barrier* const met = new absl::Barrier(3);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000), g(10000, 1.0f);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      const auto step = [&] {
        absl::Status status = kv->PushPull("w", View(g), View(w), 0);
        if (status.ok()) status = kv->WaitAll();
        ASSERT_TRUE(status.ok()) << status;
      };
      if (met->Block()) delete met;
      for (uint64_t taken = 0;; ++taken) {
        const auto work = kv->Take(1, kPlan, taken);
        ASSERT_TRUE(work.ok()) << mode << work.status();
        if (work->waited) {
          ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
        }
        if (work->range.count == 0) break;
        if (kv->rank() == 2) {  // dies with its first range
          JoinMessageHub(store.hub, RankOfWorker(3, 2, 2), {}).reset();
          return;
        }
        if (kv->rank() == 1) absl::SleepFor(absl::Milliseconds(20));
        step();
        const absl::MutexLock lock(&mu);
        ++by_worker[kv->rank()];
        for (uint64_t i = 0; i < work->range.count; ++i) {
          ++times[{work->range.epoch, work->range.first + i}];
        }
      }
      ASSERT_TRUE(kv->Barrier().ok());
    });
    EXPECT_EQ(times.size(), 200u) << mode;
    for (const auto& [sample, count] : times) EXPECT_EQ(count, 1) << sample.second;
    EXPECT_EQ(by_worker[0] + by_worker[1], 26) << mode;
    EXPECT_GT(by_worker[0], by_worker[1]) << mode;
  }
}

TEST(StoreTest, WorkThatDiffersOrIsSharedInSyncIsAnErrorOfThatWorker) {
  for (const char* const mode : {"async", "sync", "sync:quorum=1,grace=0"}) {
    StoreRanks store{.workers = 2, .mode = mode};
    absl::Barrier* const met = new absl::Barrier(2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      if (std::string(mode) != "async") {
        const absl::Status status = kv->Take(1, {10, 1, 1}, 0).status();
        EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
        if (met->Block()) delete met;
        return;
      }
      if (kv->rank() == 0) {
        EXPECT_TRUE(kv->Take(1, {10, 1, 1}, 0).ok());
      }
      ASSERT_TRUE(kv->Barrier().ok());
      if (kv->rank() == 1) {
        const absl::Status status = kv->Take(1, {10, 2, 1}, 0).status();
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
        EXPECT_NE(status.message().find("10 2 1"), std::string::npos) << status;
        EXPECT_NE(status.message().find("10 1 1"), std::string::npos) << status;
        EXPECT_TRUE(kv->Take(1, {10, 1, 1}, 0).ok());
      }
      ASSERT_TRUE(kv->Barrier().ok());
      if (met->Block()) delete met;
    });
  }
}

TEST(StoreTest, ALostServerIsAnErrorOnAllWorkers) {
  for (const char* const mode : {"sync", "async"}) {
    StoreRanks store{.workers = 2, .servers = 1, .mode = mode};
    store.timeout =
        std::chrono::seconds(3);  // so long it waits for workers that come back, in async
    absl::Barrier* const met = new absl::Barrier(2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      if (met->Block()) {
        delete met;
        JoinMessageHub(store.hub, RankOfServer(2, 0), {}).reset();
      }
      const absl::Status status = PushUntilItFails(*kv, "w", w);
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_NE(status.message().find("server 0"), std::string::npos) << status;
      EXPECT_TRUE(absl::IsUnavailable(kv->WaitAll())) << "though no pull is under way";
    });
  }
}

TEST(StoreTest, AWorkerThatDoesNotPushIsNamedAtTheDeadline) {
  StoreRanks store{.workers = 2};
  store.timeout = std::chrono::seconds(3);  // for all that must succeed before, too
  absl::Barrier* const met = new absl::Barrier(2);
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), g(10);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    if (kv->rank() == 0) {
      ASSERT_TRUE(kv->PushPull("w", View(g), View(w), 0).ok());
      const absl::Status waited = kv->WaitAll();
      EXPECT_TRUE(absl::IsDeadlineExceeded(waited)) << waited;
      EXPECT_NE(waited.message().find("for a push of worker 1"), std::string::npos) << waited;
      EXPECT_NE(waited.message().find("'w'"), std::string::npos) << waited;
    }
    if (met->Block()) delete met;
  });
}

// A server that takes nothing any more: pushes wait for room, and then end at the deadline.
TEST(StoreTest, PushesThatDoNotLeaveAreBounded) {
  StoreRanks store{.workers = 1, .mode = "async"};
  absl::Notification ready, over;
  std::thread server([&] {
    auto plane = JoinMessageHub(store.hub, RankOfServer(1, 0), {});
    StoreServer logic({.workers = 1}, CpuBackend(),
                      [&](int to, int priority, const StoreHead& head, std::vector<uint8_t> body) {
                        plane->Send(to, priority, head.ToBytes(), std::move(body)).IgnoreError();
                      });
    while (!ready.HasBeenNotified()) {
      auto event = plane->Receive(Clock::now() + std::chrono::milliseconds(20));
      if (!event.ok()) continue;
      if (auto* message = std::get_if<Message>(&*event)) {
        logic.OnMessage(message->peer, message->priority, message->head, std::move(message->body),
                        Clock::now());
      }
    }
    over.WaitForNotification();
  });
  StoreWorker::Options options = store.WorkerOptions();
  options.max_queued = 1 << 20;
  options.timeout = std::chrono::seconds(3);  // for all that must succeed before, too
  auto kv = StoreWorker::Create(store.WorkerPlane(0), options);
  ASSERT_TRUE(kv.ok()) << kv.status();
  std::vector<float> w(100000);
  ASSERT_TRUE((*kv)->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
  ASSERT_TRUE((*kv)->SetOptimizer("add:lr=1").ok());
  ready.Notify();
  absl::Status status;
  int pushes = 0;
  for (; status.ok() && pushes < 1000; ++pushes) status = (*kv)->Push("w", View(w), 0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  // The credit of 2 MiB has left, and 1 MiB waits; a push has 0.4 MB.
  EXPECT_LE(pushes, 12);
  EXPECT_GE(pushes, 4);
  over.Notify();
  server.join();
}

TEST(StoreTest, WorkersThatDisagreeAreToldBothSides) {
  StoreRanks store{.workers = 2, .servers = 2};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(kv->rank() == 0 ? 10 : 11);
    const absl::Status status = kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}});
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_NE(status.message().find("init differs"), std::string::npos) << status;
  });
  store.hub = MakeMessageHub({});
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    const absl::Status status = kv->SetOptimizer(kv->rank() == 0 ? "sgd:lr=1" : "sgd:lr=2");
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_NE(status.message().find("sgd:lr=2"), std::string::npos) << status;
  });
}

TEST(StoreTest, WrongCallsAreRefusedBeforeAnythingIsSent) {
  StoreRanks store{.workers = 1};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), other(9);
    EXPECT_TRUE(absl::IsInvalidArgument(kv->Push("w", View(w), 0)));
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(kv->Push("w", View(other), 0)));
    EXPECT_TRUE(absl::IsInvalidArgument(kv->Pull("w", View(other), 0)));
    EXPECT_TRUE(absl::IsInvalidArgument(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}})));
    EXPECT_TRUE(absl::IsInvalidArgument(kv->SetOptimizer("lamb:lr=1")));
    EXPECT_TRUE(absl::IsInvalidArgument(kv->SetCodec(CodecPair::Parse("onebit").value())));
    ASSERT_TRUE(kv->PushPull("w", View(w), View(w), 0).ok());
    EXPECT_TRUE(kv->WaitAll().ok());
  });
  EXPECT_TRUE(absl::IsInvalidArgument(StoreWorker::Create(store.WorkerPlane(0),
                                                          [&] {
                                                            StoreRanks onebit{.codec = "onebit"};
                                                            return onebit.WorkerOptions();
                                                          }())
                                          .status()));
}

TEST(StoreTest, AsyncNeedsAnOptimizer) {
  StoreRanks store{.workers = 1, .mode = "async"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->PushPull("w", View(w), View(w), 0).ok());
    const absl::Status waited = kv->WaitAll();
    EXPECT_TRUE(absl::IsFailedPrecondition(waited)) << waited;
    EXPECT_NE(waited.message().find("set_optimizer"), std::string::npos) << waited;
  });
}

// Values, slots and step numbers come back to the bit, on another number of servers too.
TEST(StoreTest, ALoadedStoreGoesOnToTheBit) {
  for (const char* const optimizer :
       {"sgd:lr=0.1,momentum=0.9,nesterov=1", "adam:lr=0.01", "adagrad:lr=0.1,lr_decay=0.1"}) {
    const OwnFolder folder;
    const std::string path = folder.File("store_state");
    uint64_t digest = 0;
    const auto train = [&](StoreWorker& kv, std::vector<float>& w, uint64_t from) {
      for (uint64_t step = from; step < from + 5; ++step) {
        std::vector<float> g = Normal(w.size(), step * 4 + kv.rank());
        ASSERT_TRUE(kv.PushPull("w", View(g), View(w), 0).ok());
        ASSERT_TRUE(kv.WaitAll().ok());
      }
    };
    StoreRanks first{.workers = 2, .servers = 2};
    first.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w = Normal(10000, 5);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer(optimizer).ok());
      train(*kv, w, 0);
      ASSERT_TRUE(kv->Save(path).ok());
      train(*kv, w, 5);
      if (kv->rank() == 0) digest = DigestOf(w);
    });
    StoreRanks second{.workers = 2, .servers = 3};
    second.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer(optimizer).ok());
      const absl::Status loaded = kv->Load(path);
      ASSERT_TRUE(loaded.ok()) << loaded;
      train(*kv, w, 5);
      EXPECT_EQ(DigestOf(w), digest) << optimizer;
    });
  }
}

// Three workers of int4 up, whose residuals are saved after five steps.
struct SavedResiduals {
  static constexpr size_t kElements = 10000;

  SavedResiduals() {
    StoreRanks store = Ranks(3, 2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w = Begin(*kv, 5);
      Train(*kv, w, 0);
      ASSERT_TRUE(kv->Save(path).ok());
      Train(*kv, w, 5);
      if (kv->rank() == 0) digest = DigestOf(w);
    });
  }
  static StoreRanks Ranks(int workers, int servers) {
    return {.workers = workers, .servers = servers, .codec = "int4:down=fp32"};
  }
  static std::vector<float> Begin(StoreWorker& kv, uint64_t seed) {
    std::vector<float> w = Normal(kElements, seed);
    EXPECT_TRUE(kv.Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    EXPECT_TRUE(kv.SetOptimizer("sgd:lr=0.1,momentum=0.9").ok());
    return w;
  }
  static void Train(StoreWorker& kv, std::vector<float>& w, uint64_t from) {
    for (uint64_t step = from; step < from + 5; ++step) {
      std::vector<float> g = Normal(w.size(), step * 4 + static_cast<uint64_t>(kv.rank()));
      ASSERT_TRUE(kv.PushPull("w", View(g), View(w), 0).ok());
      ASSERT_TRUE(kv.WaitAll().ok());
    }
  }

  const OwnFolder folder;
  const std::string path = folder.File("residuals");
  uint64_t digest = 0;
};

TEST(StoreTest, WorkersResidualsAreSavedAndLoaded) {
  const SavedResiduals saved;
  StoreRanks store = SavedResiduals::Ranks(3, 1);
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w = SavedResiduals::Begin(*kv, 6);
    SavedResiduals::Train(*kv, w, 20);  // leaves residuals of its own
    const absl::Status loaded = kv->Load(saved.path);
    ASSERT_TRUE(loaded.ok()) << loaded;
    SavedResiduals::Train(*kv, w, 5);
    EXPECT_EQ(DigestOf(w), saved.digest);
  });
  // Workers that are new begin without.
  StoreRanks more = SavedResiduals::Ranks(4, 1);
  more.Run([&](std::unique_ptr<StoreWorker>& kv) {
    SavedResiduals::Begin(*kv, 6);
    const absl::Status loaded = kv->Load(saved.path);
    EXPECT_TRUE(loaded.ok()) << loaded;
  });
}

TEST(StoreTest, ResidualsThatAreNotOfTheSaveAreRefusedOnAllWorkers) {
  const SavedResiduals saved, other;
  const auto place = [&](int rank) { return absl::StrCat(saved.path, ".worker-", rank); };
  const std::string good = ReadFile(place(1)), stale = [&] {
    StoreRanks store = SavedResiduals::Ranks(3, 1);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      SavedResiduals::Begin(*kv, 6);
      ASSERT_TRUE(kv->Save(other.path).ok());
    });
    return ReadFile(other.path + ".worker-1");
  }();
  std::string damaged = good;
  damaged[damaged.size() / 2] ^= 1;
  const std::tuple<int, std::string, const char*> cases[] = {{1, stale, "residuals of save"},
                                                             {0, stale, "worker 0's residuals are"},
                                                             {1, damaged, "damaged"},
                                                             {1, "", "can't be read"}};
  for (const auto& [rank, file, words] : cases) {
    const std::string before = ReadFile(place(rank));
    if (file.empty()) {
      std::remove(place(rank).c_str());
    } else {
      std::ofstream(place(rank), std::ios::binary) << file;
    }
    StoreRanks store = SavedResiduals::Ranks(3, 2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      const std::vector<float> w = SavedResiduals::Begin(*kv, 6);
      const absl::Status loaded = kv->Load(saved.path);
      EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
      EXPECT_NE(loaded.message().find(words), std::string::npos) << loaded;
      std::vector<float> out(w.size());
      ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(out, w);  // nothing has changed
    });
    std::ofstream(place(rank), std::ios::binary) << before;
  }
}

TEST(StoreTest, ADamagedFileIsRefusedOnAllWorkers) {
  const OwnFolder folder;
  const std::string path = folder.File("damaged_state");
  for (const size_t flip : {size_t{3}, size_t{60}, size_t{1000}}) {
    StoreRanks store{.workers = 2};
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(1000);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->Save(path).ok());
      if (kv->rank() == 0) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(static_cast<std::streamoff>(flip));
        const char byte = static_cast<char>(file.get() ^ 1);
        file.seekp(static_cast<std::streamoff>(flip));
        file.put(byte);
      }
      const absl::Status loaded = kv->Load(path);
      EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
      EXPECT_NE(loaded.message().find("damaged_state"), std::string::npos) << loaded;
      // The store goes on.
      std::vector<float> out(1000, -1.0f);
      ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(out, w);
    });
  }
}

// One server under fuzzed messages: good ones of two workers, in which heads, bodies and texts are
// changed, cut, repeated and made up.
class FuzzedServer {
 public:
  explicit FuzzedServer(uint64_t seed)
      : random_(seed),
        server_({.workers = 2, .has_journal = seed % 2 == 0}, CpuBackend(),
                [this](int, int, const StoreHead&, std::vector<uint8_t>) { ++answers; }) {}

  // Until the server has failed, or a run is over.
  void Run() {
    const char* const modes[] = {"sync", "async", "ssp:staleness=1", "sync:quorum=1,grace=0"};
    const char* const codecs[] = {"int4", "topk:density=0.1", "fp32", "adaptive:bits=2", "int8"};
    const char* const mode = modes[random_() % 4];
    const CodecPair codec = CodecPair::Parse(codecs[random_() % 5]).value();
    const StoreTable table{StoreMode::Parse(mode).value(),
                           codec,
                           1,
                           {{0, 0, kElements, 0, "w"}, {1, 0, kElements, kWidth, "table"}}};
    for (const uint32_t slice : {0u, 1u}) {
      Send(0, {.kind = Kind::kPut, .slice = slice}, std::vector<uint8_t>(kElements * 4));
    }
    for (const int worker : {0, 1}) Call(worker, Together::kInit, table.ToString());
    for (const int worker : {0, 1}) Call(worker, Together::kOptimizer, "adam:lr=0.1");
    std::vector<uint8_t> wire(EncodedBytes(codec.up, kElements));
    std::vector<float> g = Normal(kElements, 1);
    CpuBackend().Encode(codec.up, {g.data(), g.size(), DType::kF32}, nullptr, wire.data());
    const std::vector<uint32_t> ids = {0, 3, 4};
    const std::vector<uint8_t> asked = RowsBody(ids, 0);
    std::vector<uint8_t> rows =
        RowsBody(ids, EncodedBytes(RowCodec(codec.up), ids.size() * kWidth));
    if (table.mode.kind == StoreMode::Kind::kQuorum) {
      AppendWeight(3.0, &wire);
      AppendWeight(5.0, &rows);
    }
    for (uint64_t step = 1; step < 12 && server_.failure().ok(); ++step) {
      for (const int worker : {0, 1}) {
        Send(worker, {.kind = Kind::kPushPull, .number = step, .request = step}, wire);
        Send(worker, {.kind = Kind::kPush, .slice = 1, .number = step}, rows);
        Send(worker, {.kind = Kind::kPull, .slice = 1, .number = step, .request = 200 + step},
             asked);
        if (random_() % 4 == 0) Send(worker, {.kind = Kind::kGet, .request = 100 + step}, {});
        for (StoreRecord& ended : server_.EndedGraces(Deadline())) {
          server_.Apply(std::move(ended), Deadline()).IgnoreError();
        }
      }
    }
    for (const int worker : {0, 1}) Call(worker, Together::kLoad, "");
    server_.OnLost(1, absl::UnavailableError("gone"), Deadline());
    server_.OnClock(Deadline() + std::chrono::hours(1));
  }

  size_t fuzzed = 0, answers = 0;  // fuzzed: those that a server which had not failed took

 private:
  using Kind = StoreHead::Kind;
  static constexpr size_t kElements = 60, kWidth = 12;

  void Call(int worker, Together what, const std::string& text) {
    Send(worker, {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = 1},
         std::vector<uint8_t>(text.begin(), text.end()));
  }
  // A changed copy may go ahead of a message, or in its place.
  void Send(int worker, const StoreHead& head, const std::vector<uint8_t>& body) {
    if (random_() % 4 == 0) {
      SendFuzzed(worker, head, body);
      if (random_() % 2 == 0) return;
    }
    server_.OnMessage(worker, 0, head.ToBytes(), body, Deadline());
  }
  void SendFuzzed(int worker, StoreHead head, std::vector<uint8_t> body) {
    if (!server_.failure().ok()) return;
    ++fuzzed;
    std::string bytes;
    switch (random_() % 10) {
      case 0: head.slice = static_cast<uint32_t>(Number()); break;
      case 1: head.number = Number(); break;
      case 2: head.have = Number(); break;
      case 3: head.request = Number(); break;
      case 4: head.kind = static_cast<Kind>(random_() % 13); break;
      case 5: body.resize(random_() % 700); break;
      case 6:
        for (int i = 0; i < 3 && !body.empty(); ++i) body[random_() % body.size()] ^= random_();
        break;
      case 7:
        bytes = head.ToBytes();
        bytes[random_() % bytes.size()] ^= static_cast<char>(random_());
        break;
      case 8: bytes = std::string(random_() % 64, static_cast<char>(random_())); break;
      case 9: {  // a count of rows, or one of them
        const uint64_t number = Number();
        const size_t at = random_() % 3 * sizeof(number);
        if (body.size() >= at + sizeof(number)) {
          std::memcpy(body.data() + at, &number, sizeof(number));
        }
        break;
      }
    }
    if (bytes.empty()) bytes = head.ToBytes();
    server_.OnMessage(static_cast<int>(random_() % 4) - 1, 0, bytes, body, Deadline());
    server_.OnMessage(worker, 0, bytes, std::move(body), Deadline());  // and again
  }
  uint64_t Number() {
    const uint64_t numbers[] = {0, 1, 2, 3, 1 << 20, uint64_t{1} << 63, ~uint64_t{0}, random_()};
    return numbers[random_() % std::size(numbers)];
  }

  std::mt19937_64 random_;
  StoreServer server_;
};

// One server whose messages and clock the test gives, and what it answers.
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
  // The same gradient everywhere, and a pull behind it.
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
  std::vector<int> answered;  // pulls, by worker
  std::vector<float> x = std::vector<float>(kElements);
  StoreServer server;
};

constexpr std::chrono::milliseconds kHalf{250};  // of the grace below

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
  // Late: answered at once, and part of the next round.
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

// So that a run in which nobody is late can be checked against sync.
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
  store.Push(2, 1, 1.0f, 1);  // all: applied at once, and the grace of the round ends later
  store.Wait(kHalf);
  store.Push(0, 2, 1.0f, 1);
  store.Push(1, 2, 1.0f, 1);
  store.Wait(kHalf + kHalf / 2);  // the first round's
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
  // The worker says it before anything is sent, and the store goes on.
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

// Worker 2 is slow, and the others make their rounds without it; all that it has pushed counts.
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
      if (kv->rank() == 2) {  // until the others have made five rounds more
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

// Worker 2 joins while the others make a call, which goes without it, and makes the next one before
// that returns. The end of the first call is none of its own: it pushes nothing, and would be
// waited for by those whom it waits for.
TEST(StoreServerTest, NobodyWaitsForAJoinerInALaterCallWhenTheFirstOneReturns) {
  using Kind = StoreHead::Kind;
  std::map<std::pair<int, uint64_t>, int> values;  // by worker and request
  std::map<int, uint64_t> barriers;                // that have returned, by worker
  StoreServer server({.workers = 2}, CpuBackend(),
                     [&](int worker, int, const StoreHead& head, std::vector<uint8_t>) {
                       if (head.kind == Kind::kValues) ++values[{worker, head.request}];
                       const auto barrier = static_cast<uint32_t>(Together::kBarrier);
                       if (head.kind == Kind::kDone && head.slice == barrier) {
                         barriers[worker] = head.number;
                       }
                     });
  const auto send = [&](int worker, const StoreHead& head, std::string_view body) {
    server.OnMessage(worker, 0, head.ToBytes(), {body.begin(), body.end()}, Deadline());
    ASSERT_TRUE(server.failure().ok()) << server.failure();
  };
  const auto call = [&](int worker, Together what, uint64_t number, const std::string& body) {
    send(worker, {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = number},
         body);
  };
  const StoreTable table{StoreMode::Parse("ssp:staleness=1").value(),
                         CodecPair::Parse("fp32").value(),
                         1,
                         {{0, 0, 16, 0, "w"}}};
  const std::string gradient(EncodedBytes(table.codec.up, 16), '\0');
  send(0, {.kind = Kind::kPut}, std::string(64, '\0'));
  for (const int worker : {0, 1}) call(worker, Together::kInit, 1, table.ToString());
  for (const int worker : {0, 1}) call(worker, Together::kOptimizer, 1, "add:lr=1");
  call(0, Together::kBarrier, 1, "");
  send(2, {.kind = Kind::kEnter}, "");
  send(2, {.kind = Kind::kPull, .request = 1}, "");
  send(2, {.kind = Kind::kPushPull, .number = 1, .request = 2}, gradient);
  ASSERT_TRUE((values.contains({2, 2})));
  call(2, Together::kBarrier, 2, "");
  call(1, Together::kBarrier, 1, "");
  EXPECT_EQ(barriers, (std::map<int, uint64_t>{{0, 1}, {1, 1}}));
  server.OnLost(1, absl::CancelledError("it has closed its store"), Deadline());
  for (uint64_t number = 1; number <= 9; ++number) {
    send(0, {.kind = Kind::kPushPull, .number = number, .request = number}, gradient);
    ASSERT_TRUE((values.contains({0, number}))) << "push " << number << " waits for worker 2";
  }
  call(0, Together::kBarrier, 2, "");
  EXPECT_EQ(barriers, (std::map<int, uint64_t>{{0, 2}, {1, 1}, {2, 2}}));
}

// No message of a member makes a server abort.
TEST(StoreServerTest, TenThousandFuzzedMessagesAreErrors) {
  size_t fuzzed = 0, answers = 0, runs = 0;
  for (uint64_t seed = 0; fuzzed < 10000; ++seed, ++runs) {
    FuzzedServer server(seed);
    server.Run();
    fuzzed += server.fuzzed;
    answers += server.answers;
  }
  EXPECT_GT(answers, runs);
  EXPECT_LT(runs, 10000u);
}

}  // namespace
}  // namespace thinwire
