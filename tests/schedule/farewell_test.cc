// A rank leaves only once its peers no longer need it, and soon after that.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "schedule/engine/ending.h"
#include "tests/schedule/ranks.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

FrameType NextFrameFor(const Transport& transport) {
  const absl::StatusOr<ControlMessage> message = transport.control->Receive();
  return message.ok() ? ParseFrame(message->frame)->message.type : FrameType::kFail;
}

TEST(Farewell, APeersGoodbyeIsAnsweredWhenAllThatItCountsIsDone) {
  std::vector<Transport> transports = MakeInProcessTransports(2);
  const Transport& own = transports[0];
  const Options options;
  Records records({0, 2}, options);
  FailureProtocol failure({0, 2}, options, transports[0], records);
  Farewell farewell({0, 2}, options.timeout, own.control.get(), failure);
  const auto mark = [&] { ASSERT_TRUE(own.control->Send(1, PackSignal(FrameType::kPing)).ok()); };
  farewell.OnStarted(1);
  farewell.OnStarted(2);
  farewell.OnFinished();
  farewell.OnBye(1, 2);
  mark();
  farewell.OnFinished();
  mark();
  ASSERT_EQ(NextFrameFor(transports[1]), FrameType::kPing) << "one was under way";
  ASSERT_EQ(NextFrameFor(transports[1]), FrameType::kByeHeard);
  ASSERT_EQ(NextFrameFor(transports[1]), FrameType::kPing) << "once is enough";
}

// Returns rank 0's failure, of three ranks, when a connection is lost after rank 1 has said
// goodbye; `finished` of the two collectives are done.
absl::Status LostAfterAGoodbye(int finished) {
  std::vector<Transport> transports = MakeInProcessTransports(3);
  const Options options;
  Records records({0, 3}, options);
  FailureProtocol failure({0, 3}, options, transports[0], records);
  Farewell farewell({0, 3}, options.timeout, transports[0].control.get(), failure);
  farewell.OnStarted(2);
  for (int i = 0; i < finished; ++i) farewell.OnFinished();
  farewell.OnBye(1, 2);
  farewell.OnControlLost(absl::UnavailableError("rank 2 is gone"));
  return failure.status();
}

TEST(Farewell, ALostPeerIsTheReasonUnlessAllIsDoneThatAnothersGoodbyeCounts) {
  const absl::Status lost = LostAfterAGoodbye(1), left = LostAfterAGoodbye(2);
  EXPECT_EQ(lost.message(), "rank 2 is gone");
  EXPECT_TRUE(absl::StrContains(left.message(), "rank 1 closed its communicator")) << left;
}

// Rank 0 of two, which says goodbye to a peer that the test plays.
class Leaver {
 public:
  explicit Leaver(std::chrono::milliseconds timeout) : options_(With(timeout)) {}

  // Says goodbye; returns the seconds that it takes.
  double Say() {
    const Deadline start = Clock::now();
    farewell_.Say();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  Farewell& farewell() { return farewell_; }
  FrameType NextFrame() { return NextFrameFor(transports_[1]); }
  // NextFrame returns kFail from here on.
  void EndTheFrames() { transports_[1].control->Abort(absl::AbortedError("the test is over")); }

 private:
  static Options With(std::chrono::milliseconds timeout) {
    Options options;
    options.timeout = timeout;
    return options;
  }

  const Options options_;
  std::vector<Transport> transports_ = MakeInProcessTransports(2);
  Records records_{{0, 2}, options_};
  FailureProtocol failure_{{0, 2}, options_, transports_[0], records_};
  Farewell farewell_{{0, 2}, options_.timeout, transports_[0].control.get(), failure_};
};

// The wait is a 20th of the timeout. The least of several tries: others may use the processors.
TEST(Farewell, APeerThatAnswersNothingIsNotWaitedForLong) {
  double least = 1e9;
  for (int attempt = 0; attempt < 20 && least >= 1.0; ++attempt) {
    least = std::min(least, Leaver(std::chrono::seconds(5)).Say());
  }
  EXPECT_LT(least, 1.0);
}

// On a slow link a peer may need longer for its last collective than a silent peer is given (1 s
// here). An attempt in which the peer's own thread stood still for half of that shows nothing.
TEST(Farewell, APeerThatAnswersIsWaitedFor) {
  bool answered_in_time = false;
  for (int attempt = 0; attempt < 20 && !answered_in_time; ++attempt) {
    Leaver leaver(std::chrono::seconds(20));
    std::atomic<bool> done = false;
    double longest = 0.0;  // seconds to the peer's first answer, or between two of them
    Deadline last = Clock::now();
    std::thread peer([&] {
      if (leaver.NextFrame() != FrameType::kBye) return;
      for (int question = 0; question < 15; ++question) {
        const bool asked = leaver.NextFrame() == FrameType::kPing;
        if (asked) leaver.farewell().OnPong(1);
        const Deadline now = Clock::now();
        longest = std::max(longest, std::chrono::duration<double>(now - last).count());
        last = now;
        if (!asked) return;
      }
      done = true;
      leaver.farewell().OnByeHeard(1);
    });
    leaver.Say();
    const bool waited = done;
    leaver.EndTheFrames();
    peer.join();
    answered_in_time = longest < 0.5;
    if (answered_in_time) {
      EXPECT_TRUE(waited);
    }
  }
  EXPECT_TRUE(answered_in_time) << "this machine stood still in each attempt";
}

// The peers stay: only rank 0 says goodbye before it is gone. The least of several tries, since
// others may use the processors; without the peers' answers each try takes a second and a half.
TEST(Farewell, ARankLeavesWhileItsPeersStay) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    double least = 1e9;
    for (int attempt = 0; attempt < 20 && least >= 1.0; ++attempt) {
      std::atomic<bool> gone = false;
      std::vector<Transport> transports = Connect(wire, 3);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
          auto engine =
              Engine::Create(Settle(SmallChunks("int4"), 3), std::move(transports[rank]), nullptr);
          ASSERT_TRUE(engine.ok()) << engine.status();
          std::vector<float> values(10000);
          EXPECT_TRUE(AllReduce(**engine, values, "g").ok());
          while (rank != 0 && !gone) std::this_thread::yield();
          const Deadline start = Clock::now();
          engine->reset();
          if (rank != 0) return;
          least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
          gone = true;
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    EXPECT_LT(least, 1.0) << Name(wire);
  }
}

}  // namespace
}  // namespace thinwire
