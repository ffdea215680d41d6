// Members of the store that are slow, lost, killed or late, or that come back, and the work that
// they share.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/own_folder.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

TEST(StoreTest, ALostWorkerIsAnErrorOnAllInSync) {
  StoreRanks store{.workers = 3, .servers = 2};
  store.timeout = std::chrono::seconds(60);  // longer than anything here takes
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10000), g(10000);
    const absl::Status set_up = kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}});
    if (kv->rank() == 1) return;
    if (!set_up.ok()) {  // one server failed before the other answered
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

// A killed worker drops its plane without a goodbye, half-way through a step.
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
        // A member of the same rank replaces it and dies: peers lose both without a goodbye.
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

TEST(StoreTest, NobodySavesWithoutTheWorkerThatWritesTheValues) {
  const OwnFolder folder;
  const std::string path = folder.File("store_state");
  StoreRanks store{.workers = 2, .mode = "async"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(1000);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->Barrier().ok());
    if (kv->rank() == 0) {
      store.WorkerPlane(0).reset();
      return;
    }
    const absl::Status saved = kv->Save(path);
    EXPECT_TRUE(absl::IsInvalidArgument(saved)) << saved;
    EXPECT_NE(saved.message().find("worker 0, which writes the values, is gone"), std::string::npos)
        << saved;
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// Workers that were killed and started again, and workers with new numbers, join while the others
// push without a pause. They set up as at the start, and get the current values.
TEST(StoreTest, WorkersJoinARunningStoreInAsyncAndSsp) {
  for (const char* const mode : {"async", "ssp:staleness=1"}) {
    for (const char* const codec : {"fp32", "int8"}) {
      SCOPED_TRACE(absl::StrCat(mode, " ", codec));
      StoreRanks store{.workers = 2, .servers = 2, .mode = mode, .codec = codec};
      constexpr int kLives = 3;  // of worker 1, and new workers 2, 3, ...
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
          ASSERT_TRUE(kv->SetOptimizer("add:lr=0.5").ok());  // together with all that have joined
          ASSERT_TRUE(kv->Barrier().ok());
          ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
          // Every push counts once; the last push of a killed worker may count.
          const float rounded = std::round(w[0]);
          EXPECT_GE(rounded, 5.0f + static_cast<float>(pushed));
          EXPECT_LE(rounded, 5.0f + static_cast<float>(begun));
          return;
        }
        for (int i = 0; i < 5; ++i) step(*kv, w);
        std::vector<std::unique_ptr<StoreWorker>> late;
        for (int life = 0; life < 2 * kLives; ++life) {
          const int number = life < kLives ? 1 : 2 + life - kLives;
          if (life < kLives) {  // dies with a push in progress
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
          EXPECT_GE(w[0], 5.0f + static_cast<float>(before) - 4);  // some are not published yet
          for (int i = 0; i < 5; ++i) step(**joined, w);
          if (life >= kLives - 1) {  // idle workers hold up nobody
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

// Checks the servers' trace: no applied gradient is older than staleness * workers updates, counted
// from the pull that it was computed from.
struct AgeChecker {
  struct Pulled {
    uint64_t version = 0, workers = 0;
  };
  AgeChecker(uint64_t staleness, uint64_t workers) : staleness(staleness), workers(workers) {}

  const uint64_t staleness, workers;  // at the start
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

// Workers of unequal speeds: one is killed and comes back again and again, and one joins.
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

// The refusal does not affect the other workers' store.
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
        if (std::string(key) == "w") continue;
        EXPECT_NE(refused.message().find("100 elements of key 'v'"), std::string::npos) << refused;
        EXPECT_NE(refused.message().find("100 elements of key 'w'"), std::string::npos) << refused;
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

// All workers are killed at once, as if their machine failed.
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

// The fast worker takes what the slow one does not, and what a lost worker has not applied.
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
        std::chrono::seconds(3);  // in async, how long it waits for workers to come back
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
  store.timeout = std::chrono::seconds(3);  // also for all that must succeed before
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

// A server stops taking messages: pushes wait for room, and fail at the deadline.
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
  options.timeout = std::chrono::seconds(3);  // also for all that must succeed before
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
  // The credit of 2 MiB is used up, and 1 MiB waits; a push has 0.4 MB.
  EXPECT_LE(pushes, 12);
  EXPECT_GE(pushes, 4);
  over.Notify();
  server.join();
}

// The worker's deadlines pass while it is stopped, and it gets that time's messages afterwards.
TEST(StoreTest, AWorkerThatWasStoppedGoesOn) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    StoreRanks store{.workers = 2};
    store.timeout = std::chrono::milliseconds(1000);  // of the workers
    absl::Status waited;
    absl::Notification has_pushed;
    store.serve = [&store](int) {
      auto plane = JoinMessageHub(store.hub, RankOfServer(2, 0), {});
      return Serve(*plane, {.workers = 2, .timeout = std::chrono::milliseconds(60000)});
    };
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10);
      EXPECT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      if (kv->rank() == 1) {
        has_pushed.WaitForNotification();
        raise(SIGSTOP);
      }
      EXPECT_TRUE(kv->PushPull("w", View(w), View(w), 0).ok());
      if (kv->rank() == 0) has_pushed.Notify();
      const absl::Status status = kv->WaitAll();
      if (kv->rank() == 0) waited = status;
    });
    if (!waited.ok()) fprintf(stderr, "%s\n", waited.ToString().c_str());
    _exit(waited.ok() && !testing::Test::HasFailure() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(std::chrono::milliseconds(4000));
  ASSERT_EQ(kill(child, SIGCONT), 0);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace thinwire
