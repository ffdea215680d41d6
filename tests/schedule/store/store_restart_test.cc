// Servers are killed and come back from their journals. Their workers wait, and nothing is lost or
// applied twice.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "schedule/hash.h"
#include "schedule/store_host/journal.h"
#include "tests/own_folder.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

// A plane whose owner is killed after `events` events: nothing is closed, no peer is told, and its
// answers to the last event are lost.
class DyingPlane final : public MessagePlane {
 public:
  DyingPlane(std::unique_ptr<MessagePlane> plane, uint64_t events)
      : plane_(std::move(plane)), events_(events) {}
  int rank() const override { return plane_->rank(); }
  absl::Status Send(int peer, int priority, std::string head, std::vector<uint8_t> body) override {
    if (events_ == 0) return absl::OkStatus();
    return plane_->Send(peer, priority, std::move(head), std::move(body));
  }
  absl::StatusOr<MessageEvent> Receive(Deadline deadline) override {
    if (events_ == 0) return absl::AbortedError("killed");
    absl::StatusOr<MessageEvent> event = plane_->Receive(deadline);
    if (event.ok()) --events_;
    return event;
  }
  uint64_t bytes_sent() const override { return plane_->bytes_sent(); }
  absl::Status Close(Deadline deadline) override { return plane_->Close(deadline); }

 private:
  const std::unique_ptr<MessagePlane> plane_;
  uint64_t events_;
};

// Serves, and comes back after each of `kills`, which count events. Calls `away` while the server
// is gone.
absl::Status ServeAndDie(
    StoreRanks& store, int server, const JournalSpec& spec, std::vector<uint64_t> kills,
    const std::function<void()>& away = [] {}) {
  for (size_t life = 0;; ++life) {
    if (life > 0) away();
    auto journal = Journal::Open(spec, server);
    if (!journal.ok()) return journal.status();
    const absl::Status begun = (*journal)->Begin(
        {.id = "run", .server = server, .servers = store.servers, .workers = store.workers});
    if (!begun.ok()) return begun;
    DyingPlane plane(JoinMessageHub(store.hub, RankOfServer(store.workers, server), {}),
                     life < kills.size() ? kills[life] : ~uint64_t{0});
    const absl::Status served = Serve(plane,
                                      {.server = server,
                                       .workers = store.workers,
                                       .servers = store.servers,
                                       .timeout = store.timeout},
                                      journal->get());
    if (!absl::IsAborted(served)) return served;
  }
}

// 60 steps of sync training with calls of all workers in between; servers may be killed meanwhile.
uint64_t DigestOfRun(const std::string& codec, std::mt19937_64& random, bool kills) {
  StoreRanks store{.workers = 3, .servers = 2, .codec = codec};
  const OwnFolder folder;
  store.serve = [&, seed = random()](int server) {
    std::mt19937_64 mine(seed + static_cast<uint64_t>(server));
    std::vector<uint64_t> events;
    for (int i = 0; kills && i < 5; ++i) events.push_back(25 + mine() % 150);
    return ServeAndDie(store, server, {.folder = folder.path(), .bytes = 100000}, events);
  };
  absl::Mutex mu;
  std::set<uint64_t> digests;
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w = Normal(20000, 1), b = Normal(300, 2);
    std::vector<float> rows(64 * 16);
    absl::Status status = kv->Init(
        std::vector<StoreWorker::Value>{{"w", View(w)}, {"b", View(b)}, {"rows", View(rows), 16}});
    ASSERT_TRUE(status.ok()) << status;
    status = kv->SetOptimizer("adam:lr=0.01");
    ASSERT_TRUE(status.ok()) << status;
    for (uint64_t step = 0; step < 60; ++step) {
      std::vector<float> g = Normal(w.size(), step * 16 + static_cast<uint64_t>(kv->rank()));
      std::vector<float> h = Normal(b.size(), step * 16 + 8 + static_cast<uint64_t>(kv->rank()));
      status = kv->PushPull("w", View(g), View(w), 0);
      if (status.ok()) status = kv->Push("b", View(h), 1);
      const std::vector<int64_t> ids = {static_cast<int64_t>(step), kv->rank(), 63};
      std::vector<float> r = Normal(ids.size() * 16, step * 16 + static_cast<uint64_t>(kv->rank()));
      std::vector<float> pulled(r.size());
      const bool apart = step % 2 == 0;
      if (status.ok() && apart) status = kv->PushRows("rows", ids, View(r), 2);
      if (status.ok() && step % 7 == 0) status = kv->Barrier();
      if (status.ok()) status = kv->Pull("b", View(b), 1);
      if (status.ok() && apart) status = kv->PullRows("rows", ids, View(pulled), 1);
      if (status.ok() && !apart) {
        status = kv->PushPullRows("rows", {ids, View(r)}, {ids, View(pulled)}, 1);
      }
      if (status.ok()) status = kv->WaitAll();
      ASSERT_TRUE(status.ok()) << "step " << step << ": " << status;
    }
    std::vector<int64_t> all(64);
    std::iota(all.begin(), all.end(), 0);
    ASSERT_TRUE(kv->PullRows("rows", all, View(rows), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    w.insert(w.end(), b.begin(), b.end());
    w.insert(w.end(), rows.begin(), rows.end());
    const absl::MutexLock lock(&mu);
    digests.insert(DigestBytes({reinterpret_cast<const uint8_t*>(w.data()), w.size() * 4}));
  });
  for (int server = 0; server < 2; ++server) {
    EXPECT_TRUE(store.served[static_cast<size_t>(server)].ok())
        << store.served[static_cast<size_t>(server)];
    EXPECT_FALSE(std::filesystem::exists(folder.File(absl::StrCat("server-", server, ".journal"))));
  }
  EXPECT_EQ(digests.size(), 1u);
  return digests.empty() ? 0 : *digests.begin();
}

TEST(StoreRestartTest, WorkersWaitForKilledServersAndHaveTheSameBits) {
  std::random_device device;
  const uint64_t seed = device();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (const char* const codec : {"int4", "fp32"}) {
    const uint64_t calm = DigestOfRun(codec, random, false);
    EXPECT_EQ(DigestOfRun(codec, random, true), calm) << codec;
  }
}

TEST(StoreRestartTest, AJournalThatLostWhatWasAnsweredIsDataLoss) {
  StoreRanks store{.workers = 1};
  const OwnFolder folder;
  const auto cut = [&] {
    const std::string file = folder.File("server-0.journal");
    std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  };
  store.serve = [&](int server) {
    return ServeAndDie(store, server, {.folder = folder.path()}, {60}, cut);
  };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(100);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    absl::Status status;
    for (int step = 0; step < 100 && status.ok(); ++step) {
      status = kv->PushPull("w", View(w), View(w), 0);
      if (status.ok()) status = kv->WaitAll();
    }
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find("the journal lacks"), std::string::npos) << status;
  });
}

// Each push counts once, also that of a worker that pushes and leaves while the server is away.
TEST(StoreRestartTest, NothingIsLostOrAppliedTwiceInAsync) {
  for (const char* const mode : {"async", "ssp:staleness=2"}) {
    StoreRanks store{.workers = 3, .mode = mode};
    const OwnFolder folder;
    store.serve = [&](int server) {
      return ServeAndDie(store, server, {.folder = folder.path(), .bytes = 2000}, {40, 60, 33, 50});
    };
    std::vector<float> last(10);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10), g(10, 1.0f);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      for (int step = 0; step < 40; ++step) {
        const absl::Status sent = kv->PushPull("w", View(g), View(w), 0);
        ASSERT_TRUE(sent.ok()) << sent;
        const absl::Status waited = kv->WaitAll();
        ASSERT_TRUE(waited.ok()) << mode << ": " << waited;
      }
      ASSERT_TRUE(kv->Push("w", View(g), 0).ok());
      if (kv->rank() != 0) return;  // closes at once; its push counts, even if ssp holds it
      ASSERT_TRUE(kv->Barrier().ok());
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      last = w;
    });
    EXPECT_EQ(last[0], 123.0f) << mode;
  }
}

// Each push is in one round, although the server is killed while rounds wait for a quorum or a
// grace. All gradients are 1, so the mean of a round is 1.
TEST(StoreRestartTest, NothingIsLostOrAppliedTwiceWithAQuorum) {
  StoreRanks store{.workers = 3, .mode = "sync:quorum=2,grace=0.02"};
  const OwnFolder folder;
  store.serve = [&](int server) {
    return ServeAndDie(store, server, {.folder = folder.path(), .bytes = 2000}, {40, 60, 33, 50});
  };
  std::vector<float> last(10);
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10), g(10, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    float before = 0.0f;
    for (int step = 0; step < 40; ++step) {
      if (kv->rank() == 2 && step % 4 == 0) absl::SleepFor(absl::Milliseconds(40));
      const absl::Status sent = kv->PushPull("w", View(g), View(w), 0, 1.0 + kv->rank());
      ASSERT_TRUE(sent.ok()) << sent;
      const absl::Status waited = kv->WaitAll();
      ASSERT_TRUE(waited.ok()) << waited;
      EXPECT_GT(w[0], before);
      before = w[0];
    }
    ASSERT_TRUE(kv->Barrier().ok());
    ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    if (kv->rank() == 0) last = w;
  });
  EXPECT_TRUE(store.served[0].ok()) << store.served[0];
  EXPECT_GE(last[0], 40.0f);
  EXPECT_LE(last[0], 100.0f);  // a round has two pushes, except the last ones of a slow worker
  EXPECT_EQ(last[0], std::round(last[0]));
}

TEST(StoreRestartTest, AServerThatStaysAwayIsAnErrorAtTheDeadline) {
  StoreRanks store{.workers = 2};
  store.timeout = std::chrono::seconds(3);  // also for all that must succeed before
  const OwnFolder folder;
  const JournalSpec spec{.folder = folder.path()};
  store.serve = [&](int) {
    auto journal = Journal::Open(spec, 0);
    EXPECT_TRUE(journal.ok() && (*journal)->Begin({.id = "run", .workers = 2}).ok());
    DyingPlane plane(JoinMessageHub(store.hub, RankOfServer(2, 0), {}), 30);
    return Serve(plane, {.workers = 2, .timeout = store.timeout}, journal->get());
  };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    const absl::Status status = PushUntilItFails(*kv, "w", w);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find("did not come back"), std::string::npos) << status;
  });
}

// The worker does not know yet whether the server has a journal.
TEST(StoreRestartTest, AServerThatDiesBeforeItsWelcomeIsWaitedFor) {
  StoreRanks store{.workers = 1};
  const OwnFolder folder;
  store.serve = [&](int server) {
    return ServeAndDie(store, server, {.folder = folder.path()}, {2});
  };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10);
    EXPECT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
  });
  EXPECT_TRUE(store.served[0].ok()) << store.served[0];
}

// The worker that leaves while the server is away waits for it, so the others need not wait.
TEST(StoreRestartTest, AWorkerThatLeavesWhileTheServerIsAwayHasLeft) {
  StoreRanks store{.workers = 2};
  store.timeout = std::chrono::seconds(5);
  const OwnFolder folder;
  absl::Notification is_away;
  store.serve = [&](int server) {
    return ServeAndDie(store, server, {.folder = folder.path()}, {12}, [&] {
      is_away.Notify();
      absl::SleepFor(absl::Milliseconds(200));  // a worker that does not wait is gone by then
    });
  };
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(10);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    if (kv->rank() == 1) return is_away.WaitForNotification();  // and closes its store
    for (int pull = 0; pull < 5; ++pull) {
      ASSERT_TRUE(kv->Pull("w", View(w), 0).ok());
      const absl::Status waited = kv->WaitAll();
      ASSERT_TRUE(waited.ok()) << waited;
    }
  });
  EXPECT_TRUE(store.served[0].ok()) << store.served[0];
}

// The server was killed before its last answer reached the worker that left.
TEST(StoreRestartTest, AServerThatComesBackWhenAllHaveLeftAnswersThem) {
  StoreRanks store{.workers = 1};
  const OwnFolder folder;
  const StoreHead leave{.kind = StoreHead::Kind::kLeave, .slice = StoreHead::kNoSlice};
  const JournalSpec spec{.folder = folder.path()};
  {
    auto journal = Journal::Open(spec, 0);
    ASSERT_TRUE(journal.ok() && (*journal)->Begin({.id = "run", .workers = 1}).ok());
    ASSERT_TRUE(
        (*journal)
            ->Append({.kind = StoreRecord::Kind::kMessage, .head = leave.ToBytes(), .body = {}})
            .ok());
  }
  absl::Status served;
  std::thread server([&] { served = ServeAndDie(store, 0, spec, {}); });
  auto worker = store.WorkerPlane(0);
  std::vector<MessageEvent> events;
  for (int i = 0; i < 2; ++i) {
    auto event = worker->Receive(Clock::now() + std::chrono::seconds(20));
    ASSERT_TRUE(event.ok()) << event.status();
    if (i == 0) {
      ASSERT_TRUE(worker->Send(RankOfServer(1, 0), 0, leave.ToBytes(), {}).ok());
    }
    events.push_back(*std::move(event));
  }
  ASSERT_TRUE(std::holds_alternative<Message>(events[1]));
  EXPECT_EQ(StoreHead::Parse(std::get<Message>(events[1]).head)->kind, StoreHead::Kind::kStored);
  EXPECT_TRUE(worker->Close(Clock::now() + std::chrono::seconds(20)).ok());
  server.join();
  EXPECT_TRUE(served.ok()) << served;
}

// Until then a kill must find it, so that the next process answers.
TEST(StoreRestartTest, TheJournalIsThereUntilTheLastAnswersAreDelivered) {
  class ClosingPlane final : public MessagePlane {
   public:
    ClosingPlane(std::unique_ptr<MessagePlane> plane, std::function<void()> closing)
        : plane_(std::move(plane)), closing_(std::move(closing)) {}
    int rank() const override { return plane_->rank(); }
    absl::Status Send(int peer, int priority, std::string head,
                      std::vector<uint8_t> body) override {
      return plane_->Send(peer, priority, std::move(head), std::move(body));
    }
    absl::StatusOr<MessageEvent> Receive(Deadline deadline) override {
      return plane_->Receive(deadline);
    }
    uint64_t bytes_sent() const override { return plane_->bytes_sent(); }
    absl::Status Close(Deadline deadline) override {
      closing_();
      return plane_->Close(deadline);
    }

   private:
    const std::unique_ptr<MessagePlane> plane_;
    const std::function<void()> closing_;
  };
  StoreRanks store{.workers = 1};
  const OwnFolder folder;
  const std::string path = folder.File("server-0.journal");
  store.serve = [&](int) {
    auto journal = Journal::Open({.folder = folder.path()}, 0);
    EXPECT_TRUE(journal.ok() && (*journal)->Begin({.id = "run", .workers = 1}).ok());
    ClosingPlane plane(JoinMessageHub(store.hub, RankOfServer(1, 0), {}),
                       [&] { EXPECT_TRUE(std::filesystem::exists(path)); });
    return Serve(plane, {.workers = 1, .timeout = store.timeout}, journal->get());
  };
  store.Run([](std::unique_ptr<StoreWorker>& kv) { EXPECT_TRUE(kv->Barrier().ok()); });
  EXPECT_TRUE(store.served[0].ok()) << store.served[0];
  EXPECT_FALSE(std::filesystem::exists(path));
}

// The worker dies while the server is away, so no peer reports it to the server.
TEST(StoreRestartTest, AWorkerThatDoesNotComeAgainIsLost) {
  for (const char* const mode : {"sync", "async"}) {
    StoreRanks store{.workers = 2, .mode = mode};
    store.timeout = std::chrono::seconds(3);  // also for all that must succeed before
    const OwnFolder folder;
    absl::Notification is_ready, is_away, is_dead;
    // Ten events: two joins and two messages of them, values, two inits, two optimizers, a push.
    store.serve = [&](int server) {
      return ServeAndDie(store, server, {.folder = folder.path(), .fsync = true}, {10}, [&] {
        is_away.Notify();
        is_dead.WaitForNotification();
      });
    };
    absl::Status status;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10), g(10, 1.0f);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      if (kv->rank() == 1) {
        is_ready.Notify();
        is_away.WaitForNotification();
        JoinMessageHub(store.hub, 1, {}).reset();  // replaces worker 1, and dies
        is_dead.Notify();
        return;
      }
      is_ready.WaitForNotification();
      status = kv->PushPull("w", View(g), View(w), 0);
      if (status.ok()) status = kv->WaitAll();
      if (status.ok()) status = kv->Barrier();
    });
    if (std::string(mode) == "async") {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_NE(status.message().find("worker 1"), std::string::npos) << status;
    }
  }
}

}  // namespace
}  // namespace thinwire
