// The control plane over Gloo when events come faster than its threads wake up.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/leaks.h"
#include "tests/transport/gloo_ranks.h"

namespace thinwire {
namespace {

ControlFrame Numbered(int number) {
  ControlFrame frame{};
  frame[0] = static_cast<uint8_t>(number);
  return frame;
}

TEST(GlooControl, HearsWhatAPeerSaidBeforeItLeft) {
  constexpr int kRounds = 20, kFrames = 10;
  for (int round = 0; round < kRounds; ++round) {
    GlooRanks ranks(2, std::chrono::seconds(20));
    ControlPlane& control = *ranks.links[0];
    std::unique_ptr<GlooLinks>& peer = ranks.links[1];
    ranks.data[1].reset();
    // Once a frame has arrived, the peer knows this rank's receives.
    ASSERT_TRUE(peer->Send(0, ControlFrame{}).ok());
    ASSERT_TRUE(control.Receive().ok());

    Standstill standstill(ranks.links[0]->loop());
    for (int i = 1; i <= kFrames; ++i) ASSERT_TRUE(peer->Send(0, Numbered(i)).ok());
    peer.reset();
    standstill.End();

    for (int i = 1; i <= kFrames; ++i) {
      const absl::StatusOr<ControlMessage> message = control.Receive();
      ASSERT_TRUE(message.ok()) << "round " << round << ", frame " << i << ": " << message.status();
      EXPECT_EQ(message->frame[0], i);
    }
    EXPECT_TRUE(absl::IsUnavailable(control.Receive().status()));
  }
}

// A closed connection of another plane to the same peer may be noticed first.
TEST(GlooControl, HearsWhatAPeerSaidBeforeAnotherPlaneFailed) {
  constexpr int kRounds = 20, kFrames = 10;
  for (int round = 0; round < kRounds; ++round) {
    GlooRanks ranks(2);
    ControlPlane& control = *ranks.links[0];
    GlooLinks& peer = *ranks.links[1];
    // Once a frame has arrived, the peer knows this rank's receives.
    ASSERT_TRUE(peer.Send(0, ControlFrame{}).ok());
    ASSERT_TRUE(control.Receive().ok());

    Standstill standstill(ranks.links[0]->loop());
    for (int i = 1; i <= kFrames; ++i) ASSERT_TRUE(peer.Send(0, Numbered(i)).ok());
    peer.loop().Sync();
    std::vector<absl::StatusOr<ControlMessage>> heard;
    std::thread receiver([&] {
      do heard.push_back(control.Receive());
      while (heard.back().ok());
    });
    const std::shared_ptr<Failure> another = Failure::Make();
    const Failure::Listener passed_on = another->PassOn(ranks.data[0]->failure());
    another->Fail(absl::UnavailableError("rank 1 is gone"));
    standstill.End();
    receiver.join();

    ASSERT_EQ(heard.size(), kFrames + 1u) << "round " << round;
    for (int i = 1; i <= kFrames; ++i) EXPECT_EQ(heard[i - 1]->frame[0], i);
    EXPECT_EQ(heard.back().status().message(), "rank 1 is gone");
  }
}

// Zeros at a frame's end are not sent, and must replace older bytes in the ring.
TEST(GlooControl, FramesOfAnyLengthArriveAsTheyWereSent) {
  constexpr int kFrames = 200;  // many times the ring's capacity
  GlooRanks ranks(2);
  const auto filled = [](int i) {
    ControlFrame frame{};
    const size_t bytes = i * 389 % (kControlBytes + 1);  // all of them, and none
    std::fill_n(frame.begin(), bytes, static_cast<uint8_t>(i | 1));
    if (i % 3 == 0 && bytes > 2) frame[bytes / 2] = 0;
    return frame;
  };
  for (int i = 0; i < kFrames; ++i) {
    ASSERT_TRUE(ranks.links[1]->Send(0, filled(i)).ok());
    const absl::StatusOr<ControlMessage> message = ranks.links[0]->Receive();
    ASSERT_TRUE(message.ok()) << message.status();
    ASSERT_EQ(message->frame, filled(i)) << "frame " << i;
  }
}

// Sends more frames than all rings and sockets on the way hold.
TEST(GlooControl, APeerThatStandsStillHoldsUpNobodyElse) {
  constexpr int kFrames = 5000;
  GlooRanks ranks(3);
  Standstill standstill(ranks.links[1]->loop());
  for (int i = 0; i < kFrames; ++i) {
    for (int peer = 1; peer < 3; ++peer) ASSERT_TRUE(ranks.links[0]->Send(peer, Numbered(i)).ok());
  }
  for (int i = 0; i < kFrames; ++i) {
    const absl::StatusOr<ControlMessage> message = ranks.links[2]->Receive();
    ASSERT_TRUE(message.ok()) << message.status();
    ASSERT_EQ(message->frame, Numbered(i));
  }
  ranks.links[0]->Abort(absl::AbortedError("enough"));
  const auto begin = Clock::now();
  ranks.links[0]->Flush(begin + std::chrono::milliseconds(50));
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(50)) << "did not wait for its frames";
  standstill.End();
  ranks.links[0]->Flush(Clock::now() + std::chrono::seconds(20));
  for (int i = 0; i < kFrames; ++i) {
    const absl::StatusOr<ControlMessage> message = ranks.links[1]->Receive();
    ASSERT_TRUE(message.ok()) << message.status();
    ASSERT_EQ(message->frame, Numbered(i));
  }
}

// Closing must not wait for the loop, which may be about to start the first receives.
TEST(GlooControl, MayEndAsSoonAsItIsMade) {
  for (int round = 0; round < 20; ++round) GlooRanks{2};
}

// With 2 ranks as with 32, a rank's only thread is Gloo's loop.
TEST(GlooControl, TakesNoThreadForAPeer) {
  for (const int world : {2, 32}) {
    const Held before = Held::Now();
    GlooRanks ranks(world);
    for (int from = 0; from < world; ++from) {
      for (int to = 0; to < world; ++to) {
        ASSERT_TRUE(from == to || ranks.links[from]->Send(to, Numbered(from)).ok());
      }
    }
    for (const auto& control : ranks.links) {
      for (int peer = 1; peer < world; ++peer) {
        const absl::StatusOr<ControlMessage> message = control->Receive();
        ASSERT_TRUE(message.ok()) << message.status();
        EXPECT_EQ(message->frame, Numbered(message->from));
      }
    }
    // `before` may include threads that had just ended.
    const size_t most = before.threads + world;
    EXPECT_LE(Held::Settled({Held::Now().descriptors, most}).threads, most) << world;
  }
}

}  // namespace
}  // namespace thinwire
