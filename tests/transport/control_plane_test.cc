// The contract of transport/control_plane.h, the same for every control plane, and how the planes
// of one backend work together.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "tests/leaks.h"
#include "tests/transport/connect_gloo.h"
#include "transport/in_process/in_process.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Kind {
  const char* name;
  std::function<std::vector<Transport>(int)> make;
};

class ControlPlaneTest : public testing::TestWithParam<Kind> {
 protected:
  // Calls body(transport) on one thread per rank; transports live until all calls have returned.
  void Run(int world, const std::function<void(Transport&)>& body) {
    std::vector<Transport> transports = GetParam().make(world);
    std::vector<std::thread> threads;
    for (Transport& transport : transports) threads.emplace_back([&] { body(transport); });
    for (std::thread& thread : threads) thread.join();
  }
};
INSTANTIATE_TEST_SUITE_P(All, ControlPlaneTest,
                         testing::Values(Kind{"InProcess", MakeInProcessTransports},
                                         Kind{"Gloo", ConnectGlooRanks}),
                         [](const auto& info) { return info.param.name; });

Deadline Soon() { return Clock::now() + seconds(20); }

ControlFrame Numbered(int number) {
  ControlFrame frame{};
  frame[0] = static_cast<uint8_t>(number);
  frame[1] = static_cast<uint8_t>(number >> 8);
  frame.back() = static_cast<uint8_t>(number * 7);
  return frame;
}

int NumberOf(const ControlFrame& frame) {
  const int number = frame[0] | frame[1] << 8;
  EXPECT_EQ(frame.back(), static_cast<uint8_t>(number * 7));
  return number;
}

// An exchange with all ranks, in both directions.
absl::Status Exchange100(DataPlane& data, uint64_t tag, Deadline deadline) {
  const std::vector<uint8_t> mine(100);
  std::vector<std::vector<uint8_t>> in(data.size(), std::vector<uint8_t>(100));
  const std::vector<MutableBytes> recv(in.begin(), in.end());
  return data.Start(tag, std::vector<Bytes>(data.size(), mine), recv)->Wait(deadline);
}

TEST_P(ControlPlaneTest, FramesKeepTheirOrderAndTheirSender) {
  constexpr int kFrames = 300;
  Run(3, [](Transport& t) {
    const int rank = t.members().rank;
    std::thread sender([&] {
      for (int i = 0; i < kFrames; ++i) {
        for (int to = 0; to < 3; ++to) {
          ASSERT_TRUE(to == rank || t.control->Send(to, Numbered(i)).ok());
        }
      }
    });
    std::vector<int> next(3);
    for (int i = 0; i < 2 * kFrames; ++i) {
      const auto message = t.control->Receive();
      ASSERT_TRUE(message.ok()) << message.status();
      ASSERT_NE(message->from, rank);
      EXPECT_EQ(NumberOf(message->frame), next[message->from]++);
    }
    sender.join();
  });
}

// Several threads send more frames to a peer than a ring holds: each thread's stay in order.
TEST_P(ControlPlaneTest, FramesOfOneThreadStayInOrderAmongThoseOfOthers) {
  constexpr int kThreads = 4, kFrames = 500;
  Run(2, [](Transport& t) {
    if (t.members().rank == 0) {
      std::vector<std::thread> senders;
      for (int thread = 0; thread < kThreads; ++thread) {
        senders.emplace_back([&t, thread] {
          for (int i = 0; i < kFrames; ++i) {
            ControlFrame frame = Numbered(i);
            frame[2] = static_cast<uint8_t>(thread);
            ASSERT_TRUE(t.control->Send(1, frame).ok());
          }
        });
      }
      for (std::thread& sender : senders) sender.join();
      EXPECT_TRUE(t.control->Receive().ok());  // rank 1 has them all
      return;
    }
    std::vector<int> next(kThreads);
    for (int i = 0; i < kThreads * kFrames; ++i) {
      const auto message = t.control->Receive();
      ASSERT_TRUE(message.ok()) << message.status();
      ASSERT_EQ(NumberOf(message->frame), next[message->frame[2]]++);
    }
    EXPECT_TRUE(t.control->Send(0, ControlFrame{}).ok());
  });
}

TEST_P(ControlPlaneTest, SendDoesNotWaitForAPeerThatTakesNothing) {
  constexpr int kFrames = 5000;
  std::atomic<bool> sent = false;
  Run(2, [&](Transport& t) {
    if (t.members().rank == 0) {
      for (int i = 0; i < kFrames; ++i) ASSERT_TRUE(t.control->Send(1, Numbered(i)).ok());
      sent = true;
      sent.notify_all();
      EXPECT_TRUE(t.control->Receive().ok());
      return;
    }
    sent.wait(false);
    for (int i = 0; i < kFrames; ++i) {
      const auto message = t.control->Receive();
      ASSERT_TRUE(message.ok()) << message.status();
      ASSERT_EQ(NumberOf(message->frame), i);
    }
    EXPECT_TRUE(t.control->Send(0, ControlFrame{}).ok());
  });
}

TEST_P(ControlPlaneTest, AbortEndsAReceiveWithItsReason) {
  Run(2, [](Transport& t) {
    if (t.members().rank == 1) return;
    std::thread receiver([&] {
      const absl::Status status = t.control->Receive().status();
      EXPECT_EQ(status.message(), "enough") << status;
    });
    t.control->Abort(absl::AbortedError("enough"));
    t.control->Abort(absl::InternalError("too late: the first reason wins"));
    receiver.join();
    EXPECT_TRUE(absl::IsAborted(t.control->status()));
    EXPECT_TRUE(absl::IsAborted(t.control->Send(1, ControlFrame{})));
    EXPECT_TRUE(absl::IsAborted(t.control->Receive().status()));
  });
}

// A frame that is sent after a failure still arrives.
TEST_P(ControlPlaneTest, LastWordsArrive) {
  Run(2, [](Transport& t) {
    if (t.members().rank == 0) {
      t.control->Abort(absl::AbortedError("enough"));
      EXPECT_TRUE(absl::IsAborted(t.control->Send(1, Numbered(77))));
      t.control->Flush(Soon());
      return;
    }
    const auto message = t.control->Receive();
    ASSERT_TRUE(message.ok()) << message.status();
    EXPECT_EQ(NumberOf(message->frame), 77);
  });
}

TEST_P(ControlPlaneTest, FlushWithoutAFailureReturnsAtOnce) {
  Run(2, [](Transport& t) {
    const int peer = 1 - t.members().rank;
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(t.control->Send(peer, Numbered(i)).ok());
      t.control->Flush(Soon());
    }
    for (int i = 0; i < 100; ++i) {
      const auto message = t.control->Receive();
      ASSERT_TRUE(message.ok()) << message.status();
      EXPECT_EQ(NumberOf(message->frame), i);
    }
  });
}

TEST_P(ControlPlaneTest, ALostPeerIsNamedByBothPlanes) {
  std::vector<Transport> transports = GetParam().make(3);
  std::thread waiter([&] {
    const absl::Status status = transports[0].control->Receive().status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find("rank 2"), absl::string_view::npos) << status;
    const absl::Status exchange = Exchange100(*transports[0].data, 1, Soon());
    EXPECT_NE(exchange.message().find("rank 2"), absl::string_view::npos) << exchange;
  });
  transports[2].Reset();
  waiter.join();
}

TEST_P(ControlPlaneTest, PastADeadlineOfTheDataPlaneBothHaveFailed) {
  Run(2, [](Transport& t) {
    if (t.members().rank == 1) return;
    EXPECT_TRUE(absl::IsDeadlineExceeded(Exchange100(*t.data, 1, Clock::now() + milliseconds(50))));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.data->status()));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.control->status()));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.control->Send(1, ControlFrame{})));
    EXPECT_TRUE(absl::IsDeadlineExceeded(t.control->Receive().status()));
  });
}

TEST_P(ControlPlaneTest, AbortOfEitherPlaneEndsTheWaitsOfTheOther) {
  for (const bool by_control : {false, true}) {
    Run(2, [by_control](Transport& t) {
      if (t.members().rank == 1) return;
      std::thread receiver([&] { EXPECT_EQ(t.control->Receive().status().message(), "enough"); });
      std::thread exchanger([&] {
        EXPECT_EQ(Exchange100(*t.data, 1, Clock::now() + seconds(60)).message(), "enough");
      });
      if (by_control) t.control->Abort(absl::AbortedError("enough"));
      if (!by_control) t.data->Abort(absl::AbortedError("enough"));
      receiver.join();
      exchanger.join();
    });
  }
}

// A backend's data plane may be replaced by another backend's.
TEST_P(ControlPlaneTest, OutlivesItsDataPlane) {
  Run(2, [](Transport& t) {
    const int peer = 1 - t.members().rank;
    ASSERT_TRUE(Exchange100(*t.data, 1, Soon()).ok());
    t.data.reset();
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(t.control->Send(peer, Numbered(i)).ok());
      const auto message = t.control->Receive();
      ASSERT_TRUE(message.ok()) << message.status();
      EXPECT_EQ(NumberOf(message->frame), i);
    }
    EXPECT_TRUE(t.control->status().ok());
  });
}

TEST_P(ControlPlaneTest, NothingIsLeftAfter100Rounds) {
  const auto round = [](Transport& t) {
    const int peer = 1 - t.members().rank;
    ASSERT_TRUE(t.control->Send(peer, ControlFrame{}).ok());
    ASSERT_TRUE(t.control->Receive().ok());
  };
  Run(2, round);
  const Held before = Held::Now();
  for (int i = 0; i < 100; ++i) Run(2, round);
  EXPECT_LE(Held::Settled(before), before);
}

}  // namespace
}  // namespace thinwire
