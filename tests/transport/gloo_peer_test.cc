// Small blocks over Gloo: many to a frame, in any order, before they are expected, and never past
// the end of what expects them.
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/effort.h"
#include "tests/transport/gloo_ranks.h"
#include "transport/gloo/gloo_links.h"

namespace thinwire {
namespace {

Deadline Soon() { return Clock::now() + std::chrono::seconds(20); }

// What one rank sends in one exchange, and room for what comes.
struct Swap {
  std::vector<uint8_t> out, in;
  std::unique_ptr<Exchange> exchange;

  Swap(int rank, int number, size_t bytes) : out(bytes), in(bytes) {
    std::iota(out.begin(), out.end(), static_cast<uint8_t>(7 * number + rank));
  }
  void Begin(const std::unique_ptr<DataPlane>& plane, int number) {
    exchange =
        plane->Start(1000 + number, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2, in));
  }
};

class GlooParcelsTest : public testing::Test {
 protected:
  // Block i of each rank has sizes[i] bytes. One rank begins with the last one.
  void SwapAll(const std::vector<size_t>& sizes) {
    const int count = static_cast<int>(sizes.size());
    std::vector<std::vector<Swap>> swaps(2);
    for (int rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < count; ++i) swaps[rank].emplace_back(rank, i, sizes[i]);
    }
    {
      const Standstill holds_up_what_expects(ranks_.links[0]->loop());
      for (int i = 0; i < count; ++i) {
        swaps[0][i].Begin(ranks_.data[0], i);
        swaps[1][count - 1 - i].Begin(ranks_.data[1], count - 1 - i);
      }
      ranks_.links[1]->loop().Sync();
    }
    for (int rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < count; ++i) {
        ASSERT_TRUE(swaps[rank][i].exchange->Wait(Soon()).ok()) << "block " << i;
        ASSERT_EQ(swaps[rank][i].in, swaps[1 - rank][i].out) << "block " << i;
      }
    }
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(ranks_.data[rank]->bytes_sent(),
                std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}));
    }
  }

  // Blocks that rank 1 has sent, and that have come, before rank 0 expects them.
  void SwapLate(int count, int first) {
    std::vector<std::vector<Swap>> swaps(2);
    for (int i = 0; i < count; ++i) {
      for (int rank = 0; rank < 2; ++rank) swaps[rank].emplace_back(rank, i, 1000 * i + 1);
      swaps[1][i].Begin(ranks_.data[1], first + i);
    }
    TellAfterwards(1, 0);
    for (int i = 0; i < count; ++i) swaps[0][i].Begin(ranks_.data[0], first + i);
    for (int i = 0; i < count; ++i) {
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_TRUE(swaps[rank][i].exchange->Wait(Soon()).ok()) << "block " << i;
        ASSERT_EQ(swaps[rank][i].in, swaps[1 - rank][i].out) << "block " << i;
      }
    }
  }

  // Returns when rank `to` has had what rank `from` has sent it, failed or not: a control frame
  // goes by the same connection, later.
  void TellAfterwards(int from, int to) {
    for (int turns = 0; turns < 2; ++turns) ranks_.links[from]->loop().Sync();
    ranks_.links[from]->Send(to, ControlFrame{}).IgnoreError();
    const Deadline latest = Soon();
    while (!ranks_.links[to]->Receive().ok()) ASSERT_LT(Clock::now(), latest);
  }

  GlooRanks ranks_{2};
};

TEST_F(GlooParcelsTest, BlocksOfAnySizeArrive) {
  SwapAll({1, 2, 11, 12, 480, 496, 497, 512, 4080, 4096, 4592, 4593, 16383,
           GlooPeer::kLargestParcel, GlooPeer::kLargestParcel + 1, 40000});
}

// More than all frames between the two hold at once.
TEST_F(GlooParcelsTest, ManyBlocksArriveAndMeetTheirMatches) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 600; ++i) sizes.push_back(1 + i * 37 % 3000);
  SwapAll(sizes);
}

// Bytes that this process has handed to its TCP connections so far.
uint64_t BytesHandedToTcp() {
  uint64_t bytes = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0) bytes += info.tcpi_bytes_sent;
  }
  return bytes;
}

// A frame has room for more than most blocks have.
TEST_F(GlooParcelsTest, OnlyWhatAFrameHoldsIsSent) {
  constexpr int kBlocks = 100;
  constexpr size_t kBytes = 5000;  // a little more than the second largest frame has room for
  SwapAll({8});
  const uint64_t before = BytesHandedToTcp();
  for (int i = 1; i <= kBlocks; ++i) {
    std::vector<Swap> swaps;
    for (int rank = 0; rank < 2; ++rank) swaps.emplace_back(rank, i, kBytes);
    for (int rank = 0; rank < 2; ++rank) swaps[rank].Begin(ranks_.data[rank], i);
    for (int rank = 0; rank < 2; ++rank) ASSERT_TRUE(swaps[rank].exchange->Wait(Soon()).ok());
  }
  const uint64_t sent = BytesHandedToTcp() - before;
  EXPECT_GE(sent, 2 * kBlocks * kBytes - GlooPeer::kLargestParcel);  // the last may be on its way
  EXPECT_LT(sent, 2 * kBlocks * (kBytes + 400));
}

TEST_F(GlooParcelsTest, BlocksMayComeBeforeTheyAreExpected) {
  SwapAll({8});  // receives of frames are known at the other end
  SwapLate(10, 1);
}

// In the midst of a group's life they are as many as the peer has in flight, not as many as came.
TEST_F(GlooParcelsTest, WhatCameEarlyIsFreedOnceItIsTaken) {
  if (kSanitized) GTEST_SKIP() << "counts what malloc has given out, which is the sanitizer's";
  constexpr int kBlocks = 10, kRounds = 60;
  SwapAll({8});
  SwapLate(kBlocks, 1);
  const size_t before = mallinfo2().uordblks;
  for (int round = 1; round <= kRounds; ++round) SwapLate(kBlocks, 1 + round * kBlocks);
  EXPECT_LT(mallinfo2().uordblks, before + 100000) << "of 3 MB that came early";
}

// The exchange has ended, and its memory is somebody else's.
TEST_F(GlooParcelsTest, ABlockThatComesAfterAFailureIsWrittenNowhere) {
  SwapAll({8});
  Swap victim(0, 1, 64), peers(1, 1, 64);
  victim.Begin(ranks_.data[0], 1);
  ranks_.links[0]->loop().Sync();
  ranks_.links[0]->Abort(absl::AbortedError("enough"));
  EXPECT_EQ(victim.exchange->Wait(Soon()).message(), "enough");
  const std::vector<uint8_t> others(64, 0xee);
  victim.in = others;
  peers.Begin(ranks_.data[1], 1);
  TellAfterwards(1, 0);
  EXPECT_EQ(victim.in, others);
  ranks_.links[1]->Abort(absl::AbortedError("the test is over"));
  peers.exchange->Wait(Soon()).IgnoreError();
}

// A message's memory is its caller's again once the exchange has ended, although the connection is
// open and the peer goes on.
class GlooMessagesTest : public GlooParcelsTest {
 protected:
  // Returns when each loop has done what the other one's last turns led to.
  void SettleAll() {
    for (int turn = 0; turn < 6; ++turn) ranks_.links[turn % 2]->loop().Sync();
  }

  const std::vector<uint8_t> others_ = std::vector<uint8_t>(GlooPeer::kLargestParcel + 1, 0xee);
  const std::vector<Bytes> nothing_to_send_ = std::vector<Bytes>(2);
  const std::vector<MutableBytes> nothing_to_receive_ = std::vector<MutableBytes>(2);
};

TEST_F(GlooMessagesTest, OneThatComesAfterAFailureIsWrittenNowhere) {
  std::vector<uint8_t> out(others_.size()), in(others_.size());
  const auto victim = ranks_.data[0]->Start(1, nothing_to_send_, std::vector<MutableBytes>(2, in));
  SettleAll();
  ranks_.links[0]->Abort(absl::AbortedError("enough"));
  EXPECT_EQ(victim->Wait(Soon()).message(), "enough");
  in = others_;
  const auto late = ranks_.data[1]->Start(1, std::vector<Bytes>(2, out), nothing_to_receive_);
  EXPECT_TRUE(late->Wait(Soon()).ok());
  SettleAll();
  EXPECT_EQ(in, others_);
}

TEST_F(GlooMessagesTest, OneThatIsAskedForAfterAFailureIsNotSent) {
  std::vector<uint8_t> out(others_.size()), in(others_.size());
  const auto victim = ranks_.data[0]->Start(1, std::vector<Bytes>(2, out), nothing_to_receive_);
  SettleAll();
  ranks_.links[0]->Abort(absl::AbortedError("enough"));
  EXPECT_EQ(victim->Wait(Soon()).message(), "enough");
  out = others_;
  const auto late = ranks_.data[1]->Start(1, nothing_to_send_, std::vector<MutableBytes>(2, in));
  SettleAll();
  EXPECT_EQ(in, std::vector<uint8_t>(in.size()));
  ranks_.links[1]->Abort(absl::AbortedError("the test is over"));
  late->Wait(Soon()).IgnoreError();
}

// Frames that are under way leave all the same, with the blocks that they hold; what waits behind
// them is gone.
TEST_F(GlooParcelsTest, WhatIsQueuedWhenTheGroupFailsIsNotSentLater) {
  constexpr int kBlocks = 600;  // more than all frames between the two hold
  constexpr size_t kBytes = 3000;
  SwapAll({8});
  std::vector<std::vector<Swap>> swaps(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 1; i <= kBlocks; ++i) swaps[rank].emplace_back(rank, i, kBytes);
  }
  {
    const Standstill takes_nothing(ranks_.links[1]->loop());
    for (int i = 0; i < kBlocks; ++i) swaps[0][i].Begin(ranks_.data[0], 1 + i);
    for (int turns = 0; turns < 2; ++turns) ranks_.links[0]->loop().Sync();
    ranks_.links[0]->Abort(absl::AbortedError("enough"));
    for (Swap& swap : swaps[0]) {
      EXPECT_EQ(swap.exchange->Wait(Soon()).message(), "enough");
      swap.exchange.reset();
      std::fill(swap.out.begin(), swap.out.end(), 0xee);
    }
  }
  for (int i = 0; i < kBlocks; ++i) swaps[1][i].Begin(ranks_.data[1], 1 + i);
  TellAfterwards(0, 1);
  ranks_.links[1]->Abort(absl::AbortedError("the test is over"));
  int arrived = 0;
  for (int i = 0; i < kBlocks; ++i) {
    swaps[1][i].exchange->Wait(Soon()).IgnoreError();
    const std::vector<uint8_t>& in = swaps[1][i].in;
    if (in == std::vector<uint8_t>(kBytes)) continue;
    ASSERT_EQ(in, Swap(0, 1 + i, kBytes).out) << "block " << i;
    ++arrived;
  }
  EXPECT_GT(arrived, 0);
  EXPECT_LT(arrived, kBlocks);
}

// Both ends go by the size of the world, which the handshake compares.
TEST(GlooPeer, AreSmallBlocksInWorldsOfUpTo64Ranks) {
  EXPECT_TRUE(GlooPeer::TakesParcel(1, 2));
  EXPECT_TRUE(GlooPeer::TakesParcel(GlooPeer::kLargestParcel, 64));
  EXPECT_FALSE(GlooPeer::TakesParcel(GlooPeer::kLargestParcel + 1, 2));
  EXPECT_FALSE(GlooPeer::TakesParcel(1, 65));
}

// A frame that a peer makes up, its bytes after its first header the rest of the frame.
struct MadeUp {
  MadeUp(GlooLinks& links, uint64_t slot, uint32_t bytes, uint32_t damage = 0) {
    uint8_t header[16];
    std::memcpy(header, &slot, sizeof(slot));
    std::memcpy(header + 8, &bytes, sizeof(bytes));
    const uint32_t sum = Crc32c(0, Bytes(header).first(12)) ^ damage;
    std::memcpy(header + 12, &sum, sizeof(sum));
    links.loop().Post([&] {
      // The size of frames that an empty board begins with.
      frames = std::make_unique<GlooFrames>(links.context(), 0, GlooPeer::kControlSlot + 2, 512, 8);
      std::memcpy(frames->next().data(), header, sizeof(header));
      frames->Send(sizeof(header), {});
    });
    links.loop().Sync();
  }
  std::unique_ptr<GlooFrames> frames;
};

TEST_F(GlooParcelsTest, ABlockThatIsLongerThanItsFrameFailsTheGroup) {
  Swap victim(0, 0, 64);
  victim.Begin(ranks_.data[0], 0);
  const MadeUp frame(*ranks_.links[1], 77, 600);
  const absl::Status status = victim.exchange->Wait(Soon());
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find("rank 1 sent to rank 0 came damaged: a block of 600 bytes"),
            std::string::npos)
      << status;
}

// Not a block that waits for ever for what expects it.
TEST_F(GlooParcelsTest, ADamagedHeaderFailsTheGroup) {
  Swap victim(0, 0, 64);
  victim.Begin(ranks_.data[0], 0);
  const MadeUp frame(*ranks_.links[1], 77, 60, 1 << 4);
  const absl::Status status = victim.exchange->Wait(Soon());
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

struct CountingOwner final : BlockOwner {
  void OnBlockEnded(const absl::Status& status) override {
    ++ended;
    last = status;
  }
  int ended = 0;
  absl::Status last;
};

// A block of the right slot and a wrong size is not the one that is expected: nothing is written.
// The expected one ends with the group, once.
TEST_F(GlooParcelsTest, ABlockOfAnotherSizeIsNotTheOneThatIsExpected) {
  constexpr uint64_t kSlot = 77;
  std::vector<uint8_t> room(100, 0xee);
  CountingOwner owner;
  GlooLoop& loop = ranks_.links[0]->loop();
  loop.Post([&] { ranks_.links[0]->peer(1)->ReceiveParcel(kSlot, room, &owner); });
  loop.Sync();
  const MadeUp frame(*ranks_.links[1], kSlot, 120);
  Swap after(0, 1, 64), peers(1, 1, 64);  // of the same connection, so later
  after.Begin(ranks_.data[0], 1);
  peers.Begin(ranks_.data[1], 1);
  ASSERT_TRUE(after.exchange->Wait(Soon()).ok());
  ASSERT_TRUE(peers.exchange->Wait(Soon()).ok());
  loop.Sync();
  EXPECT_EQ(owner.ended, 0);
  ranks_.links[0]->Abort(absl::AbortedError("enough"));
  loop.Sync();
  EXPECT_EQ(owner.ended, 1);
  EXPECT_EQ(owner.last.message(), "enough");
  EXPECT_EQ(room, std::vector<uint8_t>(100, 0xee));
}

}  // namespace
}  // namespace thinwire
