// A group formed by Join alone, with threads as ranks: a store is all that a caller needs to get
// engines that reduce.
#include "schedule/join/join.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/engine/engine.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

JoinOptions OptionsOf(int rank, int size, std::shared_ptr<Store> store) {
  JoinOptions in;
  in.rank = rank;
  in.size = size;
  in.options.codecs = {*CodecPair::Parse("fp32")};
  in.options.timeout = std::chrono::seconds(60);
  in.store = std::move(store);
  in.group = "test";
  return in;
}

// Calls Join on one thread per rank, with options changed by `change`.
std::vector<absl::StatusOr<Joined>> JoinAll(
    int size, const std::function<void(JoinOptions&)>& change = [](JoinOptions&) {}) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  std::vector<absl::StatusOr<Joined>> joined(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      JoinOptions in = OptionsOf(rank, size, store);
      change(in);
      joined[rank] = Join(in);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return joined;
}

// Expects the mean of rank + 1 on every rank, from engines over the joined planes.
void ExpectMean(std::vector<absl::StatusOr<Joined>> joined) {
  const int size = static_cast<int>(joined.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      ASSERT_TRUE(joined[rank].ok()) << joined[rank].status();
      auto engine = Engine::Create(joined[rank]->options, std::move(joined[rank]->transport));
      ASSERT_TRUE(engine.ok()) << engine.status();
      std::vector<float> values(1000, static_cast<float>(rank + 1));
      const TensorView view{values.data(), values.size()};
      const auto work = (*engine)->Start({.input = view, .output = view, .key = "g"});
      ASSERT_TRUE(work.ok()) << work.status();
      ASSERT_TRUE((*work)->Wait().ok());
      EXPECT_EQ(values, std::vector<float>(1000, static_cast<float>(size + 1) / 2.0f));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(Join, AStoreIsEnoughForAGroup) {
  for (const int size : {2, 3}) {
    auto joined = JoinAll(size);
    for (const auto& one : joined) {
      ASSERT_TRUE(one.ok()) << one.status();
      EXPECT_EQ(one->words, "gloo over TCP");
      EXPECT_EQ(one->options.world(), size);
    }
    ExpectMean(std::move(joined));
  }
}

TEST(Join, ConnectedRanksThatHaveNothingToAgreeOnExchangeNothing) {
  for (const int size : {2, 3, 4}) {
    const bool asks_for_nodes = size == 4;
    for (const auto& one : JoinAll(size)) {
      ASSERT_TRUE(one.ok()) << one.status();
      EXPECT_EQ(one->transport.data->bytes_sent() > 0, asks_for_nodes) << size << " ranks";
    }
  }
}

TEST(Join, AGroupOfThreadsNeedsNoConnection) {
  auto joined = JoinAll(2, [](JoinOptions& in) { in.local_group = "join_test"; });
  for (const auto& one : joined) {
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ(one->words, "memory of this process");
  }
  ExpectMean(std::move(joined));
}

TEST(Join, AGroupOfOneNeedsNeitherStoreNorTransport) {
  const absl::StatusOr<Joined> joined = Join(OptionsOf(0, 1, nullptr));
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_TRUE(joined->transport.empty());
  EXPECT_EQ(joined->words, "one rank");
}

TEST(Join, OptionsAreSettledForTheGroup) {
  const auto joined = JoinAll(
      2, [](JoinOptions& in) { in.options.codecs = {*CodecPair::Parse("topk:density=0.9")}; });
  for (const auto& one : joined) {
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_FALSE(one->options->codecs[0].up.traits().entries());
  }
}

TEST(Join, LoopsAreConnectedOverTheSameStore) {
  auto joined = JoinAll(2, [](JoinOptions& in) { in.options.loops = 3; });
  for (const auto& one : joined) {
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ(one->words, "gloo over TCP, 3 loops");
  }
  ExpectMean(std::move(joined));
}

TEST(Join, WhoIsSetUpOtherwiseIsNamedOnEveryRank) {
  const auto joined = JoinAll(3, [](JoinOptions& in) {
    if (in.rank == 2) in.options.codecs = {*CodecPair::Parse("int8")};
  });
  for (const auto& one : joined) {
    EXPECT_TRUE(absl::IsFailedPrecondition(one.status())) << one.status();
    EXPECT_TRUE(absl::StrContains(one.status().message(), "rank 2")) << one.status();
  }
}

// NCCL can't exchange tensors on the host.
TEST(Join, TheFirstReasonIsEverybodys) {
  const auto joined =
      JoinAll(2, [](JoinOptions& in) { in.options.transport = TransportKind::kNccl; });
  for (const auto& one : joined) {
    EXPECT_TRUE(absl::IsUnimplemented(one.status())) << one.status();
    EXPECT_TRUE(absl::StrContains(one.status().message(), "rank 0 takes no part over NCCL"))
        << one.status();
  }
}

TEST(Join, WhatNeedsNoPeerFailsAtOnce) {
  JoinOptions in = OptionsOf(0, 2, nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(Join(in).status())) << "no store";
  in = OptionsOf(2, 2, MakeInProcessStore());
  EXPECT_TRUE(absl::IsInvalidArgument(Join(in).status())) << "no such rank";
  in = OptionsOf(0, 2, MakeInProcessStore());
  in.options.lanes = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(Join(in).status())) << "no lanes";
}

}  // namespace
}  // namespace thinwire
