// Small blocks over Gloo: many per frame, in any order, also before they are expected, and never
// beyond the end of their receive buffer.
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

// One rank's blocks in an exchange: the one it sends, and memory for the one it receives.
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
  // Block i of each rank has sizes[i] bytes. Rank 1 starts from the last block.
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

  // Rank 1 sends blocks, which arrive before rank 0 expects them.
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

  // Returns once rank `to` has received everything that rank `from` has sent, failed or not: a
  // control frame follows on the same connection.
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

// More blocks than all frames between the two ranks hold at once.
TEST_F(GlooParcelsTest, ManyBlocksArriveAndMeetTheirMatches) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 600; ++i) sizes.push_back(1 + i * 37 % 3000);
  SwapAll(sizes);
}

// Returns the bytes that this process has given to its TCP connections so far.
uint64_t BytesHandedToTcp() {
  uint64_t bytes = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0) bytes += info.tcpi_bytes_sent;
  }
  return bytes;
}

// Most blocks do not fill a frame.
TEST_F(GlooParcelsTest, OnlyWhatAFrameHoldsIsSent) {
  constexpr int kBlocks = 100;
  constexpr size_t kBytes = 5000;  // slightly more than the second largest frame holds
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
  SwapAll({8});  // the peer knows this rank's receives
  SwapLate(10, 1);
}

// Memory for early blocks depends on what the peer has in flight, not on all that came.
TEST_F(GlooParcelsTest, WhatCameEarlyIsFreedOnceItIsTaken) {
  if (kSanitized) GTEST_SKIP() << "counts what malloc has given out, which is the sanitizer's";
  constexpr int kBlocks = 10, kRounds = 60;
  SwapAll({8});
  SwapLate(kBlocks, 1);
  const size_t before = mallinfo2().uordblks;
  for (int round = 1; round <= kRounds; ++round) SwapLate(kBlocks, 1 + round * kBlocks);
  EXPECT_LT(mallinfo2().uordblks, before + 100000) << "of 3 MB that came early";
}

// The exchange has ended, and its memory is used for something else.
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

// A message's memory belongs to its caller again once the exchange has ended, although the
// connection is open and the peer continues.
class GlooMessagesTest : public GlooParcelsTest {
 protected:
  // Returns once each loop has done the work caused by the other's last turns.
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

// Frames on their way still arrive, with the blocks in them; blocks queued behind them are dropped.
TEST_F(GlooParcelsTest, WhatIsQueuedWhenTheGroupFailsIsNotSentLater) {
  constexpr int kBlocks = 600;  // more than all frames between the two ranks hold
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

// Both ends use the size of the world, which the handshake compares.
TEST(GlooPeer, AreSmallBlocksInWorldsOfUpTo64Ranks) {
  EXPECT_TRUE(GlooPeer::TakesParcel(1, 2));
  EXPECT_TRUE(GlooPeer::TakesParcel(GlooPeer::kLargestParcel, 64));
  EXPECT_FALSE(GlooPeer::TakesParcel(GlooPeer::kLargestParcel + 1, 2));
  EXPECT_FALSE(GlooPeer::TakesParcel(1, 65));
}

// A forged frame: the rest of it is the bytes of its first header's block.
struct MadeUp {
  MadeUp(GlooLinks& links, uint64_t slot, uint32_t bytes, uint32_t damage = 0) {
    uint8_t header[16];
    std::memcpy(header, &slot, sizeof(slot));
    std::memcpy(header + 8, &bytes, sizeof(bytes));
    const uint32_t sum = Crc32c(0, Bytes(header).first(12)) ^ damage;
    std::memcpy(header + 12, &sum, sizeof(sum));
    links.loop().Post([&] {
      // The frame size of an empty board.
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

// Without the check the block would wait forever for its receiver.
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

// A block with the right slot but a wrong size is not the expected one, and is not written. The
// expected block ends with the group, once.
TEST_F(GlooParcelsTest, ABlockOfAnotherSizeIsNotTheOneThatIsExpected) {
  constexpr uint64_t kSlot = 77;
  std::vector<uint8_t> room(100, 0xee);
  CountingOwner owner;
  GlooLoop& loop = ranks_.links[0]->loop();
  loop.Post([&] { ranks_.links[0]->peer(1)->ReceiveParcel(kSlot, room, &owner); });
  loop.Sync();
  const MadeUp frame(*ranks_.links[1], kSlot, 120);
  Swap after(0, 1, 64), peers(1, 1, 64);  // on the same connection, so later
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
