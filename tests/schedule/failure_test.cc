// A group fails on every rank, in time, with a typed error that names the cause.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "schedule/engine/ending.h"
#include "schedule/join/handshake.h"
#include "tests/schedule/ranks.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using testing::AssertionResult;

class FailureTest : public testing::TestWithParam<Wire> {
 protected:
  void SetUp() override {
    if (const absl::Status here = IsHere(GetParam()); !here.ok()) GTEST_SKIP() << here;
  }

  using Body = std::function<absl::Status(int, Engine&)>;

  // Runs `body` on three ranks. Every rank's failure must have `code` and contain all of `words`.
  void ExpectFailure(const Options& options, absl::StatusCode code,
                     const std::vector<std::string>& words, const Body& body) {
    const std::vector<absl::Status> failures = FailuresOf(options, body);
    for (int rank = 0; rank < 3; ++rank) {
      const absl::Status& status = failures[rank];
      EXPECT_EQ(status.code(), code) << "rank " << rank << ": " << status;
      for (const std::string& word : words) {
        EXPECT_TRUE(absl::StrContains(status.message(), word))
            << "rank " << rank << " should say '" << word << "': " << status;
      }
    }
  }

  // Like ExpectFailure, for ranks that wait for the timeout. On an overloaded machine another
  // deadline may pass first, so each further attempt has more time.
  void ExpectDeadline(Options options, const std::vector<std::string>& words, const Body& body) {
    std::vector<absl::Status> failures;
    const auto is_right = [&](const absl::Status& status) {
      return absl::IsDeadlineExceeded(status) &&
             std::all_of(words.begin(), words.end(), [&](const std::string& word) {
               return absl::StrContains(status.message(), word);
             });
    };
    for (options.timeout = milliseconds(600); options.timeout < std::chrono::seconds(60);
         options.timeout *= 2) {
      const auto begin = Clock::now();
      failures = FailuresOf(options, body);
      EXPECT_LT(Clock::now() - begin, options.timeout + std::chrono::seconds(30));
      if (std::all_of(failures.begin(), failures.end(), is_right)) return;
    }
    for (const absl::Status& status : failures) {
      EXPECT_TRUE(is_right(status))
          << status << "\nexpected '" << absl::StrJoin(words, "', '") << "'";
    }
  }

 private:
  // Returns the failures by rank.
  std::vector<absl::Status> FailuresOf(const Options& options, const Body& body) {
    std::vector<absl::Status> failures(3);
    std::barrier all(3);
    RunRanks(GetParam(), 3, options, [&](int rank, Engine& engine) {
      const absl::Status& status = failures[rank] = body(rank, engine);
      const size_t first = status.message().find("tensor 'g'");
      if (first != absl::string_view::npos) {
        EXPECT_EQ(status.message().find("tensor 'g'", first + 1), absl::string_view::npos)
            << "rank " << rank << " names the tensor twice: " << status;
      }
      std::vector<float> later(100);
      const absl::Status sticky = AllReduce(engine, later, "later");
      EXPECT_EQ(sticky.code(), status.code()) << "a failed group stays failed: " << sticky;
      all.arrive_and_wait();  // else a rank without the reason would see this one as lost
    });
    return failures;
  }
};

std::string WireName(const testing::TestParamInfo<Wire>& info) { return Name(info.param); }
INSTANTIATE_TEST_SUITE_P(All, FailureTest,
                         testing::Values(Wire::kInProcess, Wire::kGloo, Wire::kUcx), WireName);

TEST_P(FailureTest, AnotherSizeOnOneRank) {
  ExpectFailure(SmallChunks("int4"), absl::StatusCode::kFailedPrecondition,
                {"'g'", "1001", "1000", "rank 2"}, [](int rank, Engine& engine) {
                  std::vector<float> values(rank == 2 ? 1001 : 1000);
                  return AllReduce(engine, values, "g");
                });
}

TEST_P(FailureTest, AnotherSizeOfARawTensor) {
  Options options = SmallChunks("int4");
  options.min_bytes = 1 << 20;
  ExpectFailure(options, absl::StatusCode::kFailedPrecondition, {"1001", "1000", "rank 2"},
                [](int rank, Engine& engine) {
                  std::vector<float> values(rank == 2 ? 1001 : 1000);
                  return AllReduce(engine, values, "g");
                });
}

TEST_P(FailureTest, SumOnOneRankAndMeanOnTheOthers) {
  ExpectFailure(SmallChunks("int4"), absl::StatusCode::kFailedPrecondition, {"sum", "mean", "'g'"},
                [](int rank, Engine& engine) {
                  std::vector<float> values(1000);
                  return AllReduce(engine, values, "g", rank == 1 ? Op::kSum : Op::kMean);
                });
}

// The number of elements is the same, so without the shapes they would be summed silently.
TEST_P(FailureTest, AnotherShapeOnOneRank) {
  for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    ExpectFailure(options, absl::StatusCode::kFailedPrecondition,
                  {"'g'", "10x100", "100x10", "rank 2"}, [](int rank, Engine& engine) {
                    std::vector<float> values(1000);
                    const auto bucket = engine.Register(
                        {.key = "g", .numel = 1000, .shape = rank == 2 ? "100x10" : "10x100"});
                    const auto work =
                        engine.Submit(*bucket, {.input = View(values), .output = View(values)});
                    return work.ok() ? (*work)->Wait() : work.status();
                  });
  }
}

TEST_P(FailureTest, OneRankNeverCalls) {
  ExpectDeadline(SmallChunks("int4"), {"'g'", "rank 1", "never submitted"},
                 [&](int rank, Engine& engine) {
                   std::vector<float> values(1000);
                   if (rank != 1) return AllReduce(engine, values, "g");
                   while (engine.status().ok()) std::this_thread::yield();
                   return engine.status();
                 });
}

TEST_P(FailureTest, TheLeaderNeverCallsARawTensor) {
  Options options = SmallChunks("int4");
  options.min_bytes = 1 << 20;
  ExpectDeadline(options, {"'g'", "rank 0", "never submitted"}, [&](int rank, Engine& engine) {
    std::vector<float> values(1000);
    if (rank != 0) return AllReduce(engine, values, "g");
    while (engine.status().ok()) std::this_thread::yield();
    return engine.status();
  });
}

TEST_P(FailureTest, ARankCallsAnotherTensorInstead) {
  ExpectDeadline(SmallChunks("int4"), {"never submitted", "ready instead"},
                 [](int rank, Engine& engine) {
                   std::vector<float> values(1000);
                   return AllReduce(engine, values, rank == 2 ? "b" : "a");
                 });
}

TEST_P(FailureTest, AbortOnOneRankEndsAll) {
  Options options = SmallChunks("int4");
  ExpectFailure(options, absl::StatusCode::kAborted, {"enough"}, [](int rank, Engine& engine) {
    std::vector<float> values(1000);
    if (rank == 1) {
      engine.Abort(absl::AbortedError("enough"));
      return engine.status();
    }
    return AllReduce(engine, values, "g");
  });
}

// A rank that gets an error may end its process at once; then its peers know only what they have
// received. The wait for that is limited to 250 ms, so nothing is expected of a round in which a
// thread stood still for that long.
TEST_P(FailureTest, NobodyGetsAnErrorBeforeAllHaveHeardOfIt) {
  constexpr milliseconds kPatience(200);
  std::atomic<int> expected = 0;
  for (int round = 0; round < 10; ++round) {
    std::array<std::atomic<Engine*>, 3> engines{};
    std::atomic<int> seen = 0;
    RunRanks(GetParam(), 3, SmallChunks("int4"), [&](int rank, Engine& engine) {
      engines[rank] = &engine;
      for (const auto& other : engines) {
        while (other == nullptr) std::this_thread::yield();
      }
      std::vector<float> values(1000);
      Deadline before = Clock::now(), now = before;  // before: the last time without a failure
      if (rank == 1) engine.Abort(absl::AbortedError("enough"));
      const auto work = engine.Start({.input = View(values), .output = View(values), .key = "g"});
      for (; engine.status().ok(); now = Clock::now()) before = now;
      EXPECT_TRUE(absl::IsAborted(work.ok() ? (*work)->Wait() : work.status()));
      if (Clock::now() - before < kPatience) {
        ++expected;
        for (const auto& other : engines) {
          const absl::Status status = other.load()->status();
          EXPECT_TRUE(absl::IsAborted(status)) << "rank " << rank << " sees " << status;
        }
      }
      ++seen;
      while (seen < 3) std::this_thread::yield();  // engines live until all ranks have looked
    });
  }
  EXPECT_GT(expected, 0) << "this machine stood still in each round";
}

// Rank 2 closes after "g" once it may, and the others start "h" once `start_h_after` returns.
void ExpectTheClosedRankIsNamed(Wire wire, size_t min_bytes, std::atomic<bool>& may_close,
                                const std::function<void(Engine&)>& start_h_after) {
  Options options = SmallChunks("int4");
  options.min_bytes = min_bytes;
  std::atomic<int> have_g = 0;
  RunRanks(wire, 3, options, [&](int rank, Engine& engine) {
    std::vector<float> values(1000);
    EXPECT_TRUE(AllReduce(engine, values, "g").ok());
    // Otherwise the failure could also end "g" where it is still in progress.
    for (++have_g; have_g < 3;) std::this_thread::yield();
    if (rank == 2) {
      while (!may_close) std::this_thread::yield();
      return;  // destroys its engine
    }
    start_h_after(engine);
    const auto work = engine.Start({.input = View(values), .output = View(values), .key = "h"});
    may_close = true;
    const absl::Status status = work.ok() ? (*work)->Wait() : work.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    for (const char* word : {"'h'", "rank 2 closed its communicator", "same calls"}) {
      EXPECT_NE(status.message().find(word), absl::string_view::npos) << status;
    }
  });
}

TEST_P(FailureTest, ARankThatClosesWhileOthersWaitIsNamed) {
  for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
    std::atomic<bool> may_close = false;
    ExpectTheClosedRankIsNamed(GetParam(), min_bytes, may_close, [](Engine&) {});
  }
}

TEST_P(FailureTest, ARankThatIsClosingIsNamedByWhoeverStartsMore) {
  for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
    std::atomic<bool> may_close = true;
    // The failure may also come from the other remaining rank, if that saw the goodbye first.
    ExpectTheClosedRankIsNamed(GetParam(), min_bytes, may_close, [](Engine& engine) {
      const Deadline deadline = Clock::now() + std::chrono::seconds(20);
      while (engine.status().ok() && engine.Describe().find("goodbye") == std::string::npos) {
        ASSERT_LT(Clock::now(), deadline) << engine.Describe();
        std::this_thread::yield();
      }
    });
  }
}

// The rank has waited a while for the others' goodbyes, and has left without them.
TEST_P(FailureTest, ARankThatHasClosedIsNamed) {
  std::atomic<bool> may_close = true;
  ExpectTheClosedRankIsNamed(GetParam(), 0, may_close, [](Engine& engine) {
    const Deadline deadline = Clock::now() + std::chrono::seconds(20);
    while (engine.status().ok()) {
      ASSERT_LT(Clock::now(), deadline) << engine.Describe();
      std::this_thread::yield();
    }
  });
}

// A rank may have finished its last collective while its peers still exchange theirs.
TEST_P(FailureTest, AGoodbyeLeavesTheLastCollectiveAlone) {
  for (int round = 0; round < 10; ++round) {
    RunRanks(GetParam(), 3, SmallChunks("int4"), [](int, Engine& engine) {
      std::vector<float> values(100000), small(10);
      EXPECT_TRUE(AllReduce(engine, values, "g").ok());
      EXPECT_TRUE(AllReduce(engine, small, "h").ok());
    });
  }
}

TEST_P(FailureTest, MemoryIsTheCallersAgainAfterAFailure) {
  for (int round = 0; round < 10; ++round) {
    RunRanks(GetParam(), 2, SmallChunks("fp32"), [](int rank, Engine& engine) {
      auto values = std::make_unique<std::vector<float>>(1 << 20);
      auto work = engine.Start({.input = View(*values), .output = View(*values), .key = "g"});
      if (rank == 1) engine.Abort(absl::AbortedError("enough"));
      if (work.ok()) (*work)->Wait().IgnoreError();
      values.reset();  // the address sanitizer finds later writes
    });
  }
}

TEST(FailureInProcess, BadInputIsRefusedBeforeAnythingIsSent) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int8"), [](int, Engine& engine) {
    std::vector<float> a(10), b(11);
    EXPECT_TRUE(
        absl::IsInvalidArgument(engine.Start({.input = View(a), .output = View(b)}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        engine.Start({.input = {nullptr, 10}, .output = View(a)}).status()));
    const std::vector<Segment> short_by_one = {{"p", 0, 9, 9}};
    EXPECT_TRUE(absl::IsInvalidArgument(
        engine.Start({.input = View(a), .output = View(a), .key = "k", .segments = short_by_one})
            .status()));
    EXPECT_TRUE(AllReduce(engine, a, "k").ok()) << "and the group goes on";
  });
}

TEST(FailureInProcess, OneNameTwiceInFlightIsRefused) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int8"), [](int rank, Engine& engine) {
    std::vector<float> a(10000), b(10000), gate(1);
    if (rank == 0) {
      auto first = engine.Start({.input = View(a), .output = View(a), .key = "k"});
      ASSERT_TRUE(first.ok());
      EXPECT_TRUE(absl::IsInvalidArgument(
          engine.Start({.input = View(b), .output = View(b), .key = "k"}).status()));
      ASSERT_TRUE(AllReduce(engine, gate, "gate").ok());
      EXPECT_TRUE((*first)->Wait().ok());
    } else {
      ASSERT_TRUE(
          AllReduce(engine, gate, "gate").ok());  // so that rank 0's first call is in flight
      ASSERT_TRUE(AllReduce(engine, a, "k").ok());
    }
  });
}

// When a stopped process wakes up it sees that its peers are gone or have timed out.
TEST(FailureProtocol, ExplainsFailuresByAStandstillAndNoOthers) {
  const absl::Status gone = absl::UnavailableError("rank 0 is gone");
  const absl::Status mismatch = absl::FailedPreconditionError("another codec");
  const Deadline start = Clock::now();
  const auto at = [&](int ms) { return start + milliseconds(ms); };
  Options options;
  options.timeout = milliseconds(4000);
  Records records({1, 2}, options);
  Transport none;
  FailureProtocol failure({1, 2}, options, none, records);
  EXPECT_EQ(failure.WithStandstill(gone, at(9000)), gone) << "it has not begun to beat";
  failure.Beat(at(0));
  EXPECT_EQ(failure.WithStandstill(gone, at(900)), gone);
  const absl::Status asleep = failure.WithStandstill(gone, at(7200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(asleep)) << asleep;
  EXPECT_EQ(asleep.message().find("rank 1 itself was stopped for 7.2 s"), 0u) << asleep;
  EXPECT_EQ(asleep.message().find("rank 0"), absl::string_view::npos) << asleep;
  const absl::Status late =
      failure.WithStandstill(absl::DeadlineExceededError("too late"), at(7200));
  EXPECT_EQ(late.message().find("rank 1 itself was stopped for 7.2 s"), 0u) << late;
  EXPECT_NE(late.message().find("too late"), absl::string_view::npos) << late;
  failure.Beat(at(7200));
  failure.Beat(at(7220));
  EXPECT_EQ(failure.WithStandstill(gone, at(7230)), asleep) << "it has woken up";
  EXPECT_EQ(failure.WithStandstill(mismatch, at(7230)), mismatch);
  for (int ms = 7220; ms <= 11300; ms += 20) failure.Beat(at(ms));
  EXPECT_EQ(failure.WithStandstill(gone, at(11300)), gone) << "that was long ago";
}

TEST(Handshake, NamesWhatDiffers) {
  const auto store = MakeInProcessStore();
  Options int4 = SmallChunks("int4"), int8 = SmallChunks("int8");
  std::vector<absl::Status> statuses(2);
  std::thread peer([&] {
    statuses[1] =
        Handshake(*store, "x/", 1, 2, int8, Clock::now() + std::chrono::seconds(60)).status();
  });
  statuses[0] =
      Handshake(*store, "x/", 0, 2, int4, Clock::now() + std::chrono::seconds(60)).status();
  peer.join();
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_NE(status.message().find("codec=int8"), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find("codec=int4"), absl::string_view::npos) << status;
  }
}

TEST(Handshake, NamesAnotherWorldAndWhoNeverCame) {
  const auto store = MakeInProcessStore();
  const Options options = SmallChunks("int4");
  std::thread peer([&] {
    EXPECT_TRUE(absl::IsFailedPrecondition(
        Handshake(*store, "x/", 1, 3, options, Clock::now() + std::chrono::seconds(60)).status()));
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(
      Handshake(*store, "x/", 0, 2, options, Clock::now() + std::chrono::seconds(60)).status()));
  peer.join();
  const absl::Status alone =
      Handshake(*store, "y/", 0, 2, options, Clock::now() + milliseconds(50)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone)) << alone;
  EXPECT_NE(alone.message().find("rank 1"), absl::string_view::npos) << alone;
}

}  // namespace
}  // namespace thinwire
