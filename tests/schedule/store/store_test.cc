// Workers and servers of the store on the in-process plane: pulled values, bytes, and wrong calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/effort.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

// MXNet's published checks for dist_sync (tests/nightly/dist_sync_kvstore.py, check_default_keys):
// ones times rank + 1, pushed n times to an optimizer that adds rate times the sum, give exactly 1
// + (workers + 1) * workers * rate / 2 * n. The values are small integers, so nothing is rounded.
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

// MXNet's published checks of its compression in the same file (test_sync_2bit_compression, with
// compute_expected_2bit_quantization): values are sums of the thresholds that were sent.
TEST(StoreTest, MxnetsChecksOfTwoBitCompressionHold) {
  for (const int workers : {2, 4}) {
    for (const int servers : {1, 2}) {
      StoreRanks store{.workers = workers, .servers = servers};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        const float rate = 2, threshold = 0.5f;
        // Existing keys keep their codec.
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
          // The value pushed, and how many thresholds per worker the value then contains.
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
          // All workers push the same gradient, so each knows the value that it pulls.
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

// Whatever arrives first, all workers and all runs have the same bits.
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

// Up, a push is its encoded elements. Down, a pull is one encoded difference: always in sync, on
// average in async, where a worker takes all differences published since its last pull.
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
    EXPECT_GT(down, formula) << mode;  // values did come
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
        // A noisy gradient of |w - target|^2 / 2.
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
          // Waits until the fast worker is done (async), or is as far ahead as it may be.
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
      EXPECT_EQ(w[0], 80.0f) << mode;  // every push counts once
    });
  }
}

// If a pull were answered while its worker is in a barrier, the others would wait for a push that
// does not come.
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
      ASSERT_TRUE(kv->Push("w", View(g), 0).ok());  // held until the other's gradient comes
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

// Servers keep a worker's pushes until all workers have pushed, so a push waits if its worker is
// too far ahead.
TEST(StoreTest, APushWaitsForOthersThatAreTooFarBehind) {
  for (const size_t width : {0, 4}) {
    StoreRanks store{.workers = 2, .servers = 2};
    absl::Mutex mu;
    uint64_t pushed = 0;  // by worker 0
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000), row(4, 1.0f);
      const int64_t rows[] = {1};
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w), width}}).ok());
      for (uint64_t push = 1; push <= 50; ++push) {
        if (kv->rank() == 1) {
          const absl::MutexLock lock(&mu);
          const auto is_ahead = [&] { return pushed >= std::min<uint64_t>(push + 7, 50); };
          mu.Await(absl::Condition(&is_ahead));
          EXPECT_LE(pushed, push - 1 + StoreWorker::kMostAhead);
        }
        std::ranges::fill(w, static_cast<float>(push));
        ASSERT_TRUE(
            (width == 0 ? kv->Push("w", View(w), 0) : kv->PushRows("w", rows, View(row), 0)).ok());
        const absl::MutexLock lock(&mu);
        if (kv->rank() == 0) ++pushed;
      }
      if (width > 0) return;
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(w[0], 100.0f);
    });
  }
}

TEST(StoreTest, APushThatWaitsForAWorkerThatPushesNothingNamesIt) {
  StoreRanks store{.workers = 2};
  store.timeout = std::chrono::seconds(3);  // also for all that must succeed before
  absl::Notification failed;
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10);
    EXPECT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    if (kv->rank() == 1) {
      failed.WaitForNotificationWithTimeout(absl::Minutes(1));
      return;
    }
    absl::Status status;
    for (int push = 0; push < 50 && status.ok(); ++push) status = kv->Push("w", View(w), 0);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_NE(status.message().find("key 'w' has waited 3 s for a push of worker 1"),
              std::string::npos)
        << status;
    failed.Notify();
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

}  // namespace
}  // namespace thinwire
