// How a group fails: with a typed error that names the culprit, on every rank, in time.
#include <array>
#include <atomic>

#include "schedule/engine/handshake.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using testing::AssertionResult;

class FailureTest : public testing::TestWithParam<Wire> {
 protected:
  static Options ShortTimeout() {
    Options options = SmallChunks("int4");
    options.timeout = milliseconds(600);
    return options;
  }

  // Runs body on three ranks; every rank's failure must have `code` and mention all of `words`, and
  // must come within the timeout and its grace.
  void ExpectFailure(const Options& options, absl::StatusCode code, std::vector<std::string> words,
                     const std::function<absl::Status(int, Engine&)>& body) {
    RunRanks(GetParam(), 3, options, [&](int rank, Engine& engine) {
      const auto begin = Clock::now();
      const absl::Status status = body(rank, engine);
      EXPECT_LT(Clock::now() - begin, options.timeout + milliseconds(5000));
      EXPECT_EQ(status.code(), code) << "rank " << rank << ": " << status;
      for (const std::string& word : words) {
        EXPECT_NE(status.message().find(word), absl::string_view::npos)
            << "rank " << rank << " should say '" << word << "': " << status;
      }
      const size_t first = status.message().find("tensor 'g'");
      if (first != absl::string_view::npos) {
        EXPECT_EQ(status.message().find("tensor 'g'", first + 1), absl::string_view::npos)
            << "rank " << rank << " names the tensor twice: " << status;
      }
      std::vector<float> later(100);
      const absl::Status sticky = AllReduce(engine, later, "later");
      EXPECT_EQ(sticky.code(), code) << "a failed group stays failed: " << sticky;
    });
  }
};

std::string WireName(const testing::TestParamInfo<Wire>& info) {
  return info.param == Wire::kGloo ? "Gloo" : "InProcess";
}
INSTANTIATE_TEST_SUITE_P(All, FailureTest, testing::Values(Wire::kInProcess, Wire::kGloo),
                         WireName);

TEST_P(FailureTest, AnotherSizeOnOneRank) {
  ExpectFailure(ShortTimeout(), absl::StatusCode::kFailedPrecondition,
                {"'g'", "1001", "1000", "rank 2"}, [](int rank, Engine& engine) {
                  std::vector<float> values(rank == 2 ? 1001 : 1000);
                  return AllReduce(engine, values, "g");
                });
}

TEST_P(FailureTest, AnotherSizeOfARawTensor) {
  Options options = ShortTimeout();
  options.min_bytes = 1 << 20;
  ExpectFailure(options, absl::StatusCode::kFailedPrecondition, {"1001", "1000", "rank 2"},
                [](int rank, Engine& engine) {
                  std::vector<float> values(rank == 2 ? 1001 : 1000);
                  return AllReduce(engine, values, "g");
                });
}

TEST_P(FailureTest, SumOnOneRankAndMeanOnTheOthers) {
  ExpectFailure(ShortTimeout(), absl::StatusCode::kFailedPrecondition, {"sum", "mean", "'g'"},
                [](int rank, Engine& engine) {
                  std::vector<float> values(1000);
                  return AllReduce(engine, values, "g", rank == 1 ? Op::kSum : Op::kMean);
                });
}

TEST_P(FailureTest, OneRankNeverCalls) {
  std::atomic<int> waiting = 0;
  ExpectFailure(ShortTimeout(), absl::StatusCode::kDeadlineExceeded,
                {"'g'", "rank 1", "never submitted"}, [&](int rank, Engine& engine) {
                  std::vector<float> values(1000);
                  ++waiting;
                  if (rank != 1) return AllReduce(engine, values, "g");
                  while (engine.status().ok()) std::this_thread::yield();
                  return engine.status();
                });
}

TEST_P(FailureTest, TheLeaderNeverCallsARawTensor) {
  Options options = ShortTimeout();
  options.min_bytes = 1 << 20;
  ExpectFailure(options, absl::StatusCode::kDeadlineExceeded, {"'g'", "rank 0", "never submitted"},
                [&](int rank, Engine& engine) {
                  std::vector<float> values(1000);
                  if (rank != 0) return AllReduce(engine, values, "g");
                  while (engine.status().ok()) std::this_thread::yield();
                  return engine.status();
                });
}

TEST_P(FailureTest, ARankCallsAnotherTensorInstead) {
  ExpectFailure(ShortTimeout(), absl::StatusCode::kDeadlineExceeded,
                {"never submitted", "ready instead"}, [](int rank, Engine& engine) {
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

// Who gets an error may end its process at once, and then only what peers have heard remains.
TEST_P(FailureTest, NobodyGetsAnErrorBeforeAllHaveHeardOfIt) {
  for (int round = 0; round < 10; ++round) {
    std::array<std::atomic<Engine*>, 3> engines{};
    std::atomic<int> seen = 0;
    RunRanks(GetParam(), 3, SmallChunks("int4"), [&](int rank, Engine& engine) {
      engines[rank] = &engine;
      for (const auto& other : engines) {
        while (other == nullptr) std::this_thread::yield();
      }
      std::vector<float> values(1000);
      if (rank == 1) engine.Abort(absl::AbortedError("enough"));
      EXPECT_TRUE(absl::IsAborted(AllReduce(engine, values, "g")));
      for (const auto& other : engines) EXPECT_TRUE(absl::IsAborted(other.load()->status()));
      ++seen;
      while (seen < 3) std::this_thread::yield();  // the engines live until all have looked
    });
  }
}

TEST_P(FailureTest, ADestroyedRankIsNamed) {
  for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    RunRanks(GetParam(), 3, options, [](int rank, Engine& engine) {
      std::vector<float> values(1000);
      ASSERT_TRUE(AllReduce(engine, values, "g").ok());
      if (rank == 2) return;  // and its engine goes
      const absl::Status status = AllReduce(engine, values, "h");
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_NE(status.message().find("rank 2"), absl::string_view::npos) << status;
    });
  }
}

TEST_P(FailureTest, MemoryIsTheCallersAgainAfterAFailure) {
  for (int round = 0; round < 10; ++round) {
    RunRanks(GetParam(), 2, SmallChunks("fp32"), [](int rank, Engine& engine) {
      auto values = std::make_unique<std::vector<float>>(1 << 20);
      auto work = engine.AllReduce({.input = View(*values), .output = View(*values), .key = "g"});
      if (rank == 1) engine.Abort(absl::AbortedError("enough"));
      if (work.ok()) (*work)->Wait().IgnoreError();
      values.reset();  // the address sanitizer sees who still writes
    });
  }
}

TEST(FailureInProcess, BadInputIsRefusedBeforeAnythingIsSent) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int8"), [](int, Engine& engine) {
    std::vector<float> a(10), b(11);
    EXPECT_TRUE(
        absl::IsInvalidArgument(engine.AllReduce({.input = View(a), .output = View(b)}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        engine.AllReduce({.input = {nullptr, 10}, .output = View(a)}).status()));
    const std::vector<Segment> short_by_one = {{"p", 0, 9, 9}};
    EXPECT_TRUE(absl::IsInvalidArgument(
        engine
            .AllReduce({.input = View(a), .output = View(a), .key = "k", .segments = short_by_one})
            .status()));
    EXPECT_TRUE(AllReduce(engine, a, "k").ok()) << "and the group goes on";
  });
}

TEST(FailureInProcess, OneNameTwiceInFlightIsRefused) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int8"), [](int rank, Engine& engine) {
    std::vector<float> a(10000), b(10000), gate(1);
    if (rank == 0) {
      auto first = engine.AllReduce({.input = View(a), .output = View(a), .key = "k"});
      ASSERT_TRUE(first.ok());
      EXPECT_TRUE(absl::IsInvalidArgument(
          engine.AllReduce({.input = View(b), .output = View(b), .key = "k"}).status()));
      ASSERT_TRUE(AllReduce(engine, gate, "gate").ok());
      EXPECT_TRUE((*first)->Wait().ok());
    } else {
      ASSERT_TRUE(
          AllReduce(engine, gate, "gate").ok());  // so that rank 0's first call is in flight
      ASSERT_TRUE(AllReduce(engine, a, "k").ok());
    }
  });
}

TEST(Handshake, NamesWhatDiffers) {
  const auto store = MakeInProcessStore();
  Options int4 = SmallChunks("int4"), int8 = SmallChunks("int8");
  std::vector<absl::Status> statuses(2);
  std::thread peer([&] {
    statuses[1] = Handshake(*store, "x/", 1, 2, int8, Clock::now() + std::chrono::seconds(5));
  });
  statuses[0] = Handshake(*store, "x/", 0, 2, int4, Clock::now() + std::chrono::seconds(5));
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
        Handshake(*store, "x/", 1, 3, options, Clock::now() + std::chrono::seconds(5))));
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(
      Handshake(*store, "x/", 0, 2, options, Clock::now() + std::chrono::seconds(5))));
  peer.join();
  const absl::Status alone =
      Handshake(*store, "y/", 0, 2, options, Clock::now() + milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone)) << alone;
  EXPECT_NE(alone.message().find("rank 1"), absl::string_view::npos) << alone;
}

}  // namespace
}  // namespace thinwire
