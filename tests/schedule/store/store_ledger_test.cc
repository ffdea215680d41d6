// The order of the store, without threads and sockets: when a push is applied and a pull answered,
// in every mode, and which worker gets which samples.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "schedule/store/bytes.h"
#include "schedule/store/ledger.h"
#include "schedule/store/work_queue.h"

namespace thinwire {
namespace {

using Push = Ledger::Step::Push;

StoreMode Mode(std::string_view text) { return StoreMode::Parse(text).value(); }

TEST(StoreModeTest, ParsesWhatItPrintsAndRefusesTheRest) {
  for (const char* const text : {"sync", "async", "ssp:staleness=2", "sync:quorum=2,grace=0",
                                 "sync:quorum=4096,grace=3599.999"}) {
    EXPECT_EQ(Mode(text).ToString(), text);
  }
  for (const char* const text : {"",
                                 "Sync",
                                 "ssp",
                                 "ssp:staleness=0",
                                 "ssp:staleness=-1",
                                 "ssp:staleness=2x",
                                 "bsp",
                                 "sync:",
                                 "sync:quorum=2",
                                 "sync:quorum=0,grace=1",
                                 "sync:quorum=-1,grace=1",
                                 "sync:quorum=4097,grace=1",
                                 "sync:quorum=2,grace=",
                                 "sync:quorum=2,grace=-1",
                                 "sync:quorum=2,grace=nan",
                                 "sync:quorum=2,grace=inf",
                                 "sync:quorum=2,grace=3601",
                                 "sync:quorum=2.5,grace=1",
                                 "sync:grace=1,quorum=2",
                                 "sync:quorum=2,grace=1s"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(StoreMode::Parse(text).status())) << text;
  }
  EXPECT_EQ(Mode("sync:quorum=2,grace=0.25").grace, std::chrono::milliseconds(250));
}

std::vector<Ledger::Step> DrainAll(Ledger& ledger) {
  std::vector<Ledger::Step> steps;
  while (auto step = ledger.Next()) steps.push_back(*step);
  return steps;
}

TEST(LedgerTest, SyncAppliesAStepInRankOrderWhenAllArePresent) {
  Ledger ledger(Mode("sync"), 3);
  ASSERT_TRUE(ledger.OnPush(2, 1).ok());
  ledger.OnPull(2, 1, 20);
  ASSERT_TRUE(ledger.OnPush(0, 1).ok());
  ASSERT_TRUE(ledger.OnPush(0, 2).ok());  // of the next step
  EXPECT_TRUE(DrainAll(ledger).empty());
  EXPECT_EQ(ledger.WaitsFor(), std::vector<int>{1});
  ASSERT_TRUE(ledger.OnPush(1, 1).ok());
  const auto steps = DrainAll(ledger);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].pushes, (std::vector<Push>{{0, 1}, {1, 1}, {2, 1}}));
  EXPECT_TRUE(steps[1].pushes.empty());
  EXPECT_EQ(steps[1].request, 20u);
  EXPECT_EQ(ledger.version(), 1u);
}

TEST(LedgerTest, APullBeforeAnyPushIsAnsweredAtOnce) {
  for (const char* const mode : {"sync", "async", "ssp:staleness=1"}) {
    Ledger ledger(Mode(mode), 2);
    ledger.OnPull(1, 0, 5);
    EXPECT_EQ(DrainAll(ledger).size(), 1u) << mode;
  }
}

TEST(LedgerTest, CountsAPushOnceAndNoticesAGap) {
  for (const char* const mode : {"sync", "async", "ssp:staleness=1"}) {
    Ledger ledger(Mode(mode), 2);
    ASSERT_TRUE(ledger.OnPush(0, 1).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(ledger.OnPush(0, 1))) << mode;
    EXPECT_TRUE(absl::IsInternal(ledger.OnPush(0, 3))) << mode;
  }
}

TEST(LedgerTest, AsyncAppliesInTheOrderOfArrival) {
  Ledger ledger(Mode("async"), 2);
  ASSERT_TRUE(ledger.OnPush(1, 1).ok());
  ASSERT_TRUE(ledger.OnPush(0, 1).ok());
  ASSERT_TRUE(ledger.OnPush(1, 2).ok());
  const auto steps = DrainAll(ledger);
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].pushes[0], (Push{1, 1}));
  EXPECT_EQ(steps[1].pushes[0], (Push{0, 1}));
  EXPECT_EQ(steps[2].pushes[0], (Push{1, 2}));
}

TEST(LedgerTest, SspRefusesASecondPushWithoutAPull) {
  Ledger ledger(Mode("ssp:staleness=1"), 2);
  ASSERT_TRUE(ledger.OnPush(0, 1).ok());
  DrainAll(ledger);
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger.OnPush(0, 2)));
}

// Workers compute, push, and pull once their push is applied, each at its own speed. Some are
// killed or leave, and some join, under new numbers or former ones. In every schedule a gradient is
// at most staleness * workers updates old when it is applied, all pushes of workers that are not
// killed are applied, and nothing waits forever.
TEST(LedgerTest, NoSspScheduleMakesAGradientTooOldOrStandsStill) {
  struct Worker {
    enum { kAway, kComes, kComputes, kWaits, kLeaves } state = kComputes;
    uint64_t pushed = 0, applied = 0, base = 0, speed = 1, oldest = 0;
    bool counts() const { return state != kAway; }
  };
  int joins = 0, left_with_a_push = 0, held = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    const int n = 1 + static_cast<int>(random() % 7), k = 1 + static_cast<int>(random() % 3);
    Ledger ledger(Mode("ssp:staleness=" + std::to_string(k)), n);
    std::vector<Worker> workers(n);
    for (Worker& worker : workers) {
      worker.oldest = uint64_t(k) * n;
      worker.speed = 1 + random() % 20;
    }
    uint64_t version = 0;
    for (int turn = 0; turn < 400; ++turn) {
      std::vector<int> able;
      for (size_t i = 0; i < workers.size(); ++i) {
        const bool can =
            workers[i].state == Worker::kComputes || workers[i].state == Worker::kComes;
        if (can) able.insert(able.end(), workers[i].speed, static_cast<int>(i));
      }
      // Held pushes need a worker that computes.
      ASSERT_FALSE(able.empty()) << "seed " << seed << " turn " << turn << ": stands still";
      const int index = able[random() % able.size()];
      Worker& worker = workers[index];
      const auto others = std::ranges::count_if(workers, [](const Worker& other) {
        return other.state == Worker::kComputes || other.state == Worker::kComes;
      });
      const auto what = random() % 200;
      if (what == 0 && others > 1) {
        ledger.Remove(index);
        worker.state = Worker::kAway;
      } else if (what == 1 && others > 1) {
        ledger.Leave(index);
        worker.state = Worker::kAway;
      } else if (what == 2) {  // a worker that waits for its push closes its store
        for (size_t i = 0; i < workers.size(); ++i) {
          if (workers[i].state != Worker::kWaits) continue;
          ledger.Leave(static_cast<int>(i));
          workers[i].state = Worker::kLeaves;
          ++left_with_a_push;
          break;
        }
      } else if (what < 6 && workers.size() < 12) {
        size_t place = 0;
        while (place < workers.size() && workers[place].state != Worker::kAway) ++place;
        if (place == workers.size()) workers.emplace_back();
        workers[place] = {.state = Worker::kComes, .speed = 1 + random() % 20};
        ledger.Add(static_cast<int>(place));
        ++joins;
      } else if (worker.state == Worker::kComes) {
        ASSERT_TRUE(absl::IsFailedPrecondition(ledger.OnPush(index, 1)));
        worker.state = Worker::kWaits;
        ledger.OnPull(index, 0, 1);
      } else {
        worker.state = Worker::kWaits;
        ASSERT_TRUE(ledger.OnPush(index, ++worker.pushed).ok());
        ledger.OnPull(index, worker.pushed, worker.pushed);
      }
      while (auto step = ledger.Next()) {
        if (step->pushes.empty()) {
          Worker& to = workers[step->worker];
          ASSERT_EQ(to.state, Worker::kWaits);
          ASSERT_EQ(to.applied, to.pushed);
          to.base = version;
          to.oldest = uint64_t(k) * std::ranges::count_if(workers, &Worker::counts);
          to.state = Worker::kComputes;
          continue;
        }
        ASSERT_EQ(step->pushes.size(), 1u);
        Worker& from = workers[step->pushes[0].worker];
        ASSERT_TRUE(from.state == Worker::kWaits || from.state == Worker::kLeaves);
        ASSERT_LE(version - from.base, from.oldest) << "seed " << seed << " turn " << turn;
        ASSERT_EQ(step->pushes[0].number, ++from.applied);
        if (from.state == Worker::kLeaves) from.state = Worker::kAway;
        ++version;
      }
      ASSERT_EQ(ledger.version(), version);
      held += static_cast<int>(std::ranges::count_if(workers, [](const Worker& other) {
        return other.state == Worker::kWaits || other.state == Worker::kLeaves;
      }));
    }
  }
  EXPECT_GT(joins, 1000);
  EXPECT_GT(left_with_a_push, 1000);
  EXPECT_GT(held, 1000);
}

TEST(LedgerTest, APushOfAWorkerThatLeavesCounts) {
  for (const char* const mode : {"sync", "ssp:staleness=1"}) {
    Ledger ledger(Mode(mode), 2);
    uint64_t number = 0;
    for (; number < 2; ++number) {  // ssp holds the second push, sync holds both
      ASSERT_TRUE(ledger.OnPush(0, number + 1).ok());
      ledger.OnPull(0, number + 1, number + 1);
      DrainAll(ledger);
    }
    if (std::string(mode) == "ssp:staleness=1") {
      ASSERT_TRUE(ledger.OnPush(0, 3).ok());
      ASSERT_TRUE(DrainAll(ledger).empty());
    }
    ledger.Leave(0);
    EXPECT_TRUE(DrainAll(ledger).empty()) << mode;
    EXPECT_EQ(ledger.WaitsFor(), std::vector<int>{1}) << mode;
    ASSERT_TRUE(ledger.OnPush(1, 1).ok());
    const auto steps = DrainAll(ledger);
    ASSERT_FALSE(steps.empty()) << mode;
    EXPECT_EQ(ledger.version(), mode[1] == 's' ? 4u : 1u) << mode;
  }
}

// The others go on while two workers are in a call; no deadline is missed when these return late.
TEST(LedgerTest, AWorkerThatDidNotTakePartInACallRunsOn) {
  Ledger ledger(Mode("ssp:staleness=1"), 2);
  ledger.Add(2);
  ledger.OnPull(2, 0, 1);
  ASSERT_EQ(DrainAll(ledger).size(), 1u);  // its gradient may be 3 updates old
  ledger.Pause(0);
  ledger.Pause(1);
  for (uint64_t number = 1; number <= 2; ++number) {
    ASSERT_TRUE(ledger.OnPush(2, number).ok());
    ledger.OnPull(2, number, number);
    ASSERT_EQ(DrainAll(ledger).size(), 2u);
  }
  ledger.Resume(std::vector<int>{
      0, 1});  // at version 2 both are due by version 2, so only one can be applied
  ASSERT_TRUE(ledger.OnPush(0, 1).ok());
  EXPECT_EQ(DrainAll(ledger).size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger.OnPush(1, 1)));
}

TEST(LedgerTest, SspLetsAFastWorkerRunAheadToTheBoundAndNotFurther) {
  Ledger ledger(Mode("ssp:staleness=2"), 2);
  uint64_t number = 0;
  const auto turn = [&] {
    EXPECT_TRUE(ledger.OnPush(0, ++number).ok());
    ledger.OnPull(0, number, number);
    return DrainAll(ledger).size();
  };
  for (int i = 0; i < 4; ++i) EXPECT_EQ(turn(), 2u) << i;
  EXPECT_EQ(turn(), 0u);  // worker 1's gradient would be 5 updates old
  EXPECT_EQ(ledger.WaitsFor(), std::vector<int>{1});
  ASSERT_TRUE(ledger.OnPush(1, 1).ok());
  EXPECT_EQ(DrainAll(ledger).size(), 3u);
}

TEST(LedgerTest, NobodyWaitsForAWorkerInABarrier) {
  Ledger ledger(Mode("ssp:staleness=1"), 2);
  ledger.Pause(1);
  for (uint64_t number = 1; number <= 5; ++number) {
    ASSERT_TRUE(ledger.OnPush(0, number).ok());
    ledger.OnPull(0, number, number);
    EXPECT_EQ(DrainAll(ledger).size(), 2u);
  }
  ledger.Pause(0);
  ledger.Resume(std::vector<int>{0, 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger.OnPush(1, 1)));  // 5 updates old
  ASSERT_TRUE(ledger.OnPush(0, 6).ok());
  EXPECT_EQ(DrainAll(ledger).size(), 1u);
}

TEST(LedgerTest, NobodyWaitsForAWorkerWhosePullIsAnsweredInABarrier) {
  Ledger ledger(Mode("ssp:staleness=1"), 2);
  ASSERT_TRUE(ledger.OnPush(1, 1).ok());
  ledger.Pause(1);
  ledger.OnPull(1, 1, 1);
  EXPECT_EQ(DrainAll(ledger).size(), 2u);
  for (uint64_t number = 1; number <= 9; ++number) {
    ASSERT_TRUE(ledger.OnPush(0, number).ok());
    ledger.OnPull(0, number, number);
    EXPECT_EQ(DrainAll(ledger).size(), 2u) << number;
  }
}

// Each worker pushes the gradient of its last pull, and then pulls.
class QuorumTest : public testing::Test {
 protected:
  Ledger ledger_{Mode("sync:quorum=2,grace=1"), 3};
  uint64_t numbers_[4] = {};

  // Returns the steps that the ledger then takes.
  std::vector<Ledger::Step> Push(int worker) {
    const uint64_t number = ++numbers_[worker];
    const absl::Status pushed = ledger_.OnPush(worker, number);
    EXPECT_TRUE(pushed.ok()) << pushed;
    ledger_.OnPull(worker, number, number);
    return DrainAll(ledger_);
  }
};

TEST_F(QuorumTest, ARoundWithAllPushesNeedsNoGrace) {
  EXPECT_TRUE(Push(2).empty());
  EXPECT_FALSE(ledger_.HasQuorum());
  EXPECT_EQ(ledger_.WaitsFor(), (std::vector<int>{0, 1}));
  EXPECT_TRUE(Push(0).empty());
  EXPECT_TRUE(ledger_.HasQuorum());
  EXPECT_TRUE(ledger_.WaitsFor().empty());  // only the grace's end is awaited
  const auto steps = Push(1);
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[0].pushes, (std::vector<Ledger::Step::Push>{{0, 1}, {1, 1}, {2, 1}}));
  EXPECT_EQ(ledger_.version(), 1u);
  EXPECT_FALSE(ledger_.HasQuorum());
}

TEST_F(QuorumTest, TheEndOfTheGraceCountsWithAQuorumOnly) {
  EXPECT_TRUE(Push(0).empty());
  ledger_.EndGrace();
  EXPECT_TRUE(DrainAll(ledger_).empty());
  EXPECT_TRUE(Push(1).empty()) << "an end without a quorum is not kept";
  ledger_.EndGrace();
  const auto steps = DrainAll(ledger_);
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].pushes, (std::vector<Ledger::Step::Push>{{0, 1}, {1, 1}}));
}

// The late worker gets the values of the round without it at once, and is in time again.
TEST_F(QuorumTest, ALatePushGoesWithTheNextRoundAndDoesNotCountForIt) {
  Push(0);
  Push(1);
  ledger_.EndGrace();
  DrainAll(ledger_);
  auto steps = Push(2);  // of version 0, at version 1
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_TRUE(steps[0].pushes.empty());
  EXPECT_EQ(steps[0].worker, 2);
  EXPECT_TRUE(Push(0).empty());
  EXPECT_FALSE(ledger_.HasQuorum());
  EXPECT_TRUE(Push(2).empty());
  EXPECT_TRUE(ledger_.HasQuorum());
  steps = Push(1);
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[0].pushes, (std::vector<Ledger::Step::Push>{{0, 2}, {1, 2}, {2, 1}, {2, 2}}));
}

TEST_F(QuorumTest, NobodyWaitsForWorkersThatComputeNothing) {
  ledger_.Pause(1);
  ledger_.Idle(2);
  EXPECT_EQ(Push(0).size(), 2u);
  ledger_.Resume(std::vector<int>{1});
  EXPECT_TRUE(Push(0).empty());
  ledger_.Leave(1);
  EXPECT_EQ(DrainAll(ledger_).size(), 2u);
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.OnPush(2, 1)));  // it is idle until it pulls
  ledger_.OnPull(2, 0, 1);
  EXPECT_EQ(DrainAll(ledger_).size(), 1u);
  EXPECT_TRUE(Push(0).empty());
  EXPECT_EQ(Push(2).size(), 3u);
}

// A restored server gets a loss again, also for slices that had already applied everything.
TEST_F(QuorumTest, LeavingAgainChangesNothing) {
  const auto saved = [this] {
    ByteWriter out;
    ledger_.Save(out);
    return std::move(out).Finish();
  };
  Push(1);
  ledger_.Leave(1);
  Push(0);
  EXPECT_EQ(Push(2).size(), 3u);
  const std::vector<uint8_t> before = saved();
  ledger_.Leave(1);
  EXPECT_EQ(saved(), before);
}

TEST_F(QuorumTest, APushNeedsAPullSinceTheLastOne) {
  ASSERT_TRUE(ledger_.OnPush(0, 1).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.OnPush(0, 2)));
  ledger_.Add(3);
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.OnPush(3, 1)));
  EXPECT_TRUE(absl::IsAlreadyExists(ledger_.OnPush(0, 1)));
}

// Workers of any speed push and pull. Some are lost, leave or join; the grace ends at any time; the
// ledger is saved and restored in between. In every schedule an applied round has a quorum, unless
// no worker computes. It has all pushes that came since the last round, so every push of a worker
// that is not lost is applied once. Only workers whose push is of the current round wait.
TEST(LedgerTest, NoScheduleOfRoundsLosesAPushOrStandsStill) {
  struct Worker {
    enum { kAway, kComes, kComputes, kWaits } state = kComputes;
    uint64_t pushed = 0, applied = 0, base = 0, speed = 1;
  };
  int late = 0, graces = 0, joins = 0, restored = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    const int n = 1 + static_cast<int>(random() % 5), k = 1 + static_cast<int>(random() % n);
    const StoreMode mode = Mode("sync:quorum=" + std::to_string(k) + ",grace=1");
    auto ledger = std::make_unique<Ledger>(mode, n);
    std::vector<Worker> workers(n);
    for (Worker& worker : workers) worker.speed = 1 + random() % 20;
    uint64_t version = 0;
    std::map<std::pair<int, uint64_t>, uint64_t> arrived;  // held pushes: version at arrival
    std::vector<Push> order;                               // in the order of arrival
    bool is_grace_over = false;
    const auto drain = [&] {
      const auto waiting = [&](const Worker& worker) { return worker.state == Worker::kWaits; };
      while (auto step = ledger->Next()) {
        if (step->pushes.empty()) {
          Worker& to = workers[step->worker];
          ASSERT_EQ(to.state, Worker::kWaits);
          to.base = version;
          to.state = Worker::kComputes;
          continue;
        }
        ASSERT_TRUE(std::ranges::is_sorted(step->pushes, {}, &Push::worker));
        const bool all = std::ranges::none_of(
            workers, [](const Worker& worker) { return worker.state == Worker::kComputes; });
        ASSERT_TRUE(all || (is_grace_over && std::ranges::count_if(workers, waiting) >= k))
            << "seed " << seed;
        is_grace_over = false;
        ASSERT_EQ(step->pushes.size(), arrived.size()) << "all that is there";
        for (const Push& push : step->pushes) {
          ASSERT_EQ(push.number, ++workers[push.worker].applied);
          ASSERT_EQ(arrived.at({push.worker, push.number}), version) << "its round or the next";
          arrived.erase({push.worker, push.number});
          std::erase(order, push);
        }
        ++version;
      }
      ASSERT_EQ(ledger->version(), version);
      for (const Worker& worker : workers) {
        ASSERT_TRUE(worker.state != Worker::kWaits || worker.base == version) << "seed " << seed;
      }
    };
    for (int turn = 0; turn < 200; ++turn) {
      std::vector<int> able;
      for (size_t i = 0; i < workers.size(); ++i) {
        if (workers[i].state == Worker::kComputes || workers[i].state == Worker::kComes) {
          able.insert(able.end(), workers[i].speed, static_cast<int>(i));
        }
      }
      if (able.empty()) break;  // all have left
      const int index = able[random() % able.size()];
      Worker& worker = workers[index];
      const auto what = random() % 100;
      if (what == 0) {
        ledger->Remove(index);
        worker.state = Worker::kAway;
        std::erase_if(arrived, [&](const auto& entry) { return entry.first.first == index; });
        std::erase_if(order, [&](const Push& push) { return push.worker == index; });
      } else if (what == 1) {
        ledger->Leave(index);
        worker.state = Worker::kAway;
      } else if (what == 2 && workers.size() < 7) {
        workers.push_back({.state = Worker::kComes, .base = version, .speed = 1 + random() % 20});
        ledger->Add(static_cast<int>(workers.size()) - 1);
        ++joins;
      } else if (what < 10) {
        is_grace_over = ledger->HasQuorum();
        graces += is_grace_over ? 1 : 0;
        ledger->EndGrace();
      } else if (what < 13) {
        ByteWriter out;
        ledger->Save(out);
        const std::vector<uint8_t> bytes = std::move(out).Finish();
        ByteReader in(bytes);
        ledger = std::make_unique<Ledger>(mode, n);
        ASSERT_TRUE(ledger->Restore(in) && in.is_done());
        for (const Push& push : order) {
          ASSERT_TRUE(ledger->OnPush(push.worker, push.number).ok());
          ASSERT_FALSE(ledger->Next().has_value()) << "seed " << seed << " turn " << turn;
        }
        for (size_t i = 0; i < workers.size(); ++i) {
          if (workers[i].state != Worker::kWaits) continue;
          ledger->OnPull(static_cast<int>(i), workers[i].pushed, workers[i].pushed);
        }
        for (size_t i = 0; i < workers.size(); ++i) {  // those that left with held pushes
          const bool held = std::ranges::any_of(
              order, [&](const Push& push) { return push.worker == static_cast<int>(i); });
          if (workers[i].state == Worker::kAway && held) ledger->Leave(static_cast<int>(i));
        }
        ++restored;
      } else if (worker.state == Worker::kComes) {
        worker.state = Worker::kWaits;
        ledger->OnPull(index, 0, 1);
      } else {
        late += worker.base < version ? 1 : 0;
        worker.state = Worker::kWaits;
        ASSERT_TRUE(ledger->OnPush(index, ++worker.pushed).ok()) << "seed " << seed;
        arrived[{index, worker.pushed}] = version;
        order.push_back({index, worker.pushed});
        ledger->OnPull(index, worker.pushed, worker.pushed);
      }
      drain();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(late, 1000);
  EXPECT_GT(graces, 1000);
  EXPECT_GT(joins, 500);
  EXPECT_GT(restored, 1000);
}

TEST(WorkQueueTest, ParsesWhatItPrintsAndRefusesTheRest) {
  const WorkPlan plan{.samples = 10, .batch = 4, .epochs = 3};
  EXPECT_EQ(WorkPlan::Parse(plan.ToString()).value(), plan);
  for (const char* const wrong : {"", "1 2", "1 0 1", "1 4294967296 1", "-1 1 1", "1 1 1 1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(WorkPlan::Parse(wrong).status())) << wrong;
  }
}

// Workers ask, apply and are lost in any order; the queue may be saved and restored. Each sample is
// applied at least once, and exactly once if no worker is lost.
TEST(WorkQueueTest, EachSampleIsAppliedAndOnceWithoutLosses) {
  int repeated = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    const bool losses = seed % 2 == 1;
    const WorkPlan plan{
        .samples = random() % 60, .batch = 1 + random() % 9, .epochs = 1 + random() % 3};
    auto queue = std::make_unique<WorkQueue>(plan);
    struct Worker {
      uint64_t taken = 0, applied = 0;
      std::vector<WorkRange> ranges;
    };
    std::vector<Worker> workers(4);
    std::map<std::pair<uint64_t, uint64_t>, int> applied;  // by epoch and sample
    for (bool over = false; !over;) {
      const auto index = random() % workers.size();
      Worker& worker = workers[index];
      if (losses && random() % 40 == 0) {
        queue->GiveBack(static_cast<int>(index));
        worker = {};
        continue;
      }
      if (random() % 20 == 0) {
        ByteWriter out;
        queue->Save(out);
        const std::vector<uint8_t> bytes = std::move(out).Finish();
        ByteReader in(bytes);
        queue = std::make_unique<WorkQueue>(plan);
        ASSERT_TRUE(queue->Restore(in) && in.is_done());
      }
      while (worker.applied < worker.taken && random() % 2 == 0) {
        const WorkRange& range = worker.ranges[worker.applied++];
        for (uint64_t i = 0; i < range.count; ++i) ++applied[{range.epoch, range.first + i}];
      }
      queue->Apply(static_cast<int>(index), worker.applied);
      const auto range = queue->Take(static_cast<int>(index), worker.taken + 1);
      if (!range.has_value()) continue;
      over = range->count == 0;
      if (over) break;
      EXPECT_EQ(queue->Take(static_cast<int>(index), worker.taken + 1), range);  // asks again
      ++worker.taken;
      worker.ranges.push_back(*range);
    }
    ASSERT_EQ(applied.size(), plan.samples * plan.epochs) << "seed " << seed;
    for (const auto& [sample, times] : applied) {
      repeated += times > 1 ? 1 : 0;
      ASSERT_TRUE(losses || times == 1) << "seed " << seed;
    }
  }
  EXPECT_EQ(repeated, 0);  // all report what they applied before they are lost
}

}  // namespace
}  // namespace thinwire
