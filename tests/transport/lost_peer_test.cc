// One failure for all planes of a rank, and groups that go on without a peer.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/transport/gloo_ranks.h"
#include "transport/in_process/in_process.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

using LostPeer = Failure::LostPeer;
using std::chrono::seconds;

TEST(Failure, TheFirstReasonStaysAndAllListenersHearOfIt) {
  const auto failure = Failure::Make();
  int before = 0, after = 0, removed = 0;
  const Failure::Listener early = failure->Listen([&] { ++before; });
  {
    const Failure::Listener ended = failure->Listen([&] { ++removed; });
  }
  EXPECT_TRUE(failure->reason().ok());
  failure->Fail(absl::AbortedError("enough"));
  failure->Fail(absl::InternalError("too late"));
  const Failure::Listener late = failure->Listen([&] { ++after; });
  EXPECT_TRUE(failure->failed());
  EXPECT_EQ(failure->reason().message(), "enough");
  EXPECT_EQ(failure->peer_reason(3).message(), "enough");
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 1);
  EXPECT_EQ(removed, 0);
}

// A listener may ask, fail, and end listeners; nothing is locked meanwhile.
TEST(Failure, AListenerMayCallTheFailureAndEndItself) {
  const auto failure = Failure::Make();
  Failure::Listener own;
  std::string heard;
  own = failure->Listen([&] {
    heard = std::string(failure->reason().message());
    failure->Fail(absl::InternalError("again"));
    own.Reset();
  });
  failure->Fail(absl::AbortedError("enough"));
  EXPECT_EQ(heard, "enough");
}

// Whoever ends a listener frees what it uses.
TEST(Failure, TheEndOfAListenerWaitsForItsCall) {
  const auto failure = Failure::Make();
  absl::Notification called, go_on;
  std::atomic<bool> returned{false};
  auto listener = std::make_unique<Failure::Listener>(failure->Listen([&] {
    called.Notify();
    go_on.WaitForNotification();
    returned = true;
  }));
  std::thread fails([&] { failure->Fail(absl::AbortedError("enough")); });
  called.WaitForNotification();
  std::thread ends([&] {
    listener.reset();
    EXPECT_TRUE(returned);
  });
  go_on.Notify();
  ends.join();
  fails.join();
}

TEST(Failure, ATieFailsBothAndALostPeerStaysWhereItIs) {
  const auto one = Failure::Make(LostPeer::kFailsItsPart), other = Failure::Make();
  {
    const FailureTie tie(one, other);
    one->LosePeer(2, absl::UnavailableError("rank 2 is gone"));
    EXPECT_FALSE(one->failed());
    EXPECT_FALSE(other->failed());
    EXPECT_EQ(one->peer_reason(2).message(), "rank 2 is gone");
    EXPECT_TRUE(one->peer_reason(1).ok());
    other->Fail(absl::AbortedError("enough"));
  }
  EXPECT_EQ(one->reason().message(), "enough");
}

// As of a data plane beside the control plane of another backend.
TEST(Failure, PassedOnItEndsTheWaitsOfAnotherPlaneWhileThatIsAskedFor) {
  for (const bool asked_for : {true, false}) {
    std::vector<Transport> transports = MakeInProcessTransports(2),
                           others = MakeInProcessTransports(2);
    const std::vector<uint8_t> out(8);
    std::vector<uint8_t> in(8);
    const auto exchange =
        others[0].data->Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2, in));
    Failure::Listener listener =
        FailureTie::PassOn(*transports[0].control->failure(), others[0].data->failure());
    if (!asked_for) listener.Reset();
    transports[1].Reset();
    if (!asked_for) others[0].data->Abort(absl::AbortedError("not asked for"));
    const absl::Status status = exchange->Wait(Clock::now() + seconds(60));
    EXPECT_EQ(absl::IsUnavailable(status), asked_for) << status;
    EXPECT_EQ(status == transports[0].control->status(), asked_for);
  }
}

TEST(Failure, ALostPeerFailsAllUnlessAskedOtherwise) {
  const auto failure = Failure::Make();
  failure->LosePeer(2, absl::UnavailableError("rank 2 is gone"));
  EXPECT_EQ(failure->reason().message(), "rank 2 is gone");
}

// Three ranks, of which rank 2 leaves.
class LostPeerTest : public testing::TestWithParam<bool> {
 protected:
  LostPeerTest() {
    constexpr int kWorld = 3;
    if (GetParam()) {
      for (auto& links :
           ConnectGlooLinks(kWorld, LostPeer::kFailsItsPart, std::chrono::milliseconds(200))) {
        std::unique_ptr<DataPlane> data = GlooDataOver(*links);
        ranks_.emplace_back(std::move(links), std::move(data));
      }
    } else {
      ranks_ = MakeInProcessTransportsWith(LostPeer::kFailsItsPart, kWorld);
    }
  }

  // Rank `rank`'s exchange of one block with each of `peers`, filled with its own number.
  struct Swap {
    Swap(DataPlane& plane, uint64_t tag, const std::vector<int>& peers, size_t bytes)
        : out(bytes, static_cast<uint8_t>(plane.rank() + 1)),
          in(plane.size(), std::vector<uint8_t>(bytes)) {
      std::vector<Bytes> send(plane.size());
      std::vector<MutableBytes> recv(plane.size());
      for (const int peer : peers) {
        send[peer] = out;
        recv[peer] = in[peer];
      }
      exchange = plane.Start(tag, send, recv);
    }
    absl::Status Wait() { return exchange->Wait(Clock::now() + seconds(20)); }

    std::vector<uint8_t> out;
    std::vector<std::vector<uint8_t>> in;
    std::unique_ptr<Exchange> exchange;
  };

  void ExpectThatTheOthersGoOn(uint64_t tag, size_t bytes) {
    Swap first(*ranks_[0].data, tag, {1}, bytes), second(*ranks_[1].data, tag, {0}, bytes);
    EXPECT_TRUE(first.Wait().ok());
    EXPECT_TRUE(second.Wait().ok());
    EXPECT_EQ(first.in[1], second.out);
    EXPECT_EQ(second.in[0], first.out);
  }

  std::vector<Transport> ranks_;
};

TEST_P(LostPeerTest, ExchangesWithItEndAndAllOthersGoOn) {
  for (const size_t bytes : {size_t{100}, size_t{1} << 20}) ExpectThatTheOthersGoOn(bytes, bytes);
  std::vector<Swap> waiting;
  for (const size_t bytes : {size_t{100}, size_t{1} << 20}) {
    waiting.emplace_back(*ranks_[0].data, 7 + bytes, std::vector<int>{1, 2}, bytes);
    waiting.emplace_back(*ranks_[1].data, 7 + bytes, std::vector<int>{0, 2}, bytes);
  }
  ranks_[2].Reset();
  for (Swap& swap : waiting) {
    const absl::Status status = swap.Wait();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find("rank 2 is gone"), std::string::npos) << status;
  }
  for (const size_t bytes : {size_t{200}, size_t{2} << 20}) ExpectThatTheOthersGoOn(bytes, bytes);

  // What begins afterwards ends as well.
  Swap late(*ranks_[0].data, 9, {2}, 300);
  EXPECT_TRUE(absl::IsUnavailable(late.Wait()));
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r].data->status().ok()) << ranks_[r].data->status();
    EXPECT_TRUE(absl::IsUnavailable(ranks_[r].control->failure()->peer_reason(2)));
  }
}

TEST_P(LostPeerTest, FramesReachThoseThatAreLeft) {
  ranks_[2].Reset();
  while (ranks_[0].control->failure()->peer_reason(2).ok()) std::this_thread::yield();
  EXPECT_TRUE(absl::IsUnavailable(ranks_[0].control->Send(2, ControlFrame{})));
  ControlFrame frame{};
  frame[0] = 42;
  EXPECT_TRUE(ranks_[0].control->Send(1, frame).ok());
  const absl::StatusOr<ControlMessage> message = ranks_[1].control->Receive();
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->from, 0);
  EXPECT_EQ(message->frame, frame);
}

INSTANTIATE_TEST_SUITE_P(Planes, LostPeerTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Gloo" : "InProcess"; });

}  // namespace
}  // namespace thinwire
