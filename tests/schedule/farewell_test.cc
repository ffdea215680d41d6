// When a rank may leave: not before its peers need it no more, and not long after.
#include "schedule/engine/farewell.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

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
  const Pulse pulse(options.timeout);
  FlightRecorder recorder;
  FailureProtocol failure({0, 2}, options, transports[0], pulse, recorder);
  Farewell farewell({0, 2}, own.control.get(), failure);
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

// They stay for as long as they like: nobody but rank 0 says goodbye before it is gone. The least
// of a few tries, since others may hold the processors in any one; without the peers' answers each
// takes two seconds.
TEST(Farewell, ARankLeavesWhileItsPeersStay) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    double least = 1e9;
    for (int attempt = 0; attempt < 3; ++attempt) {
      std::atomic<bool> gone = false;
      std::vector<Transport> transports = Connect(wire, 3);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
          auto engine = Engine::Create(SmallChunks("int4"), std::move(transports[rank]), nullptr);
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
