// The shim in front of the fake NCCL, with threads as ranks and CPU threads as their devices. An
// unmodified program under LD_PRELOAD is in test_nccl_shim.py.
#include "integrations/nccl_shim/nccl_shim.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "compress/element_math.h"
#include "tests/effort.h"
#include "tests/integrations/nccl_shim_ranks.h"

namespace thinwire {
namespace {

TEST_F(NcclShimTest, SumsAndMeansAreCompressedAndAlikeOnAllRanks) {
  for (const int world : {2, 3, 5}) {
    const int reductions = Fake().reductions;
    Ranks ranks = RanksWithCodec(world, "int8");
    std::vector<std::vector<float>> sums(world), means(world);
    OnRanks(ranks, [&](int r) {
      sums[r] = ranks[r]->Sum(ValuesOf(r));
      means[r] = ranks[r]->Reduce(ValuesOf(r), kNcclF32, kNcclAvg, "mean", /*in_place=*/false);
    });
    EXPECT_EQ(WatchedDevices::allocated, 0)
        << "communicators were destroyed, and what is theirs not";
    std::vector<float> exact = ExactSum(world);
    for (int r = 0; r < world; ++r) {
      EXPECT_EQ(sums[r], sums[0]) << "rank " << r << " of " << world;
      EXPECT_EQ(means[r], means[0]) << "rank " << r << " of " << world;
    }
    const float error = LargestError(sums[0], exact);
    EXPECT_GT(error, 0.0f) << "int8 has lost nothing: nothing was compressed";
    EXPECT_LT(error, 0.02f * static_cast<float>(world));
    for (float& value : exact) value /= static_cast<float>(world);
    EXPECT_LT(LargestError(means[0], exact), 0.02f);
    EXPECT_EQ(Fake().reductions, reductions) << "NCCL's own allreduce ran";
  }
}

TEST_F(NcclShimTest, HalvesAreCompressedAsTheyAre) {
  Ranks ranks = RanksWithCodec(2, "int8");
  std::vector<std::vector<uint16_t>> bf16(2), f16(2);
  OnRanks(ranks, [&](int r) {
    std::vector<uint16_t> values;
    for (const float value : ValuesOf(r)) values.push_back(ToBf16(value));
    bf16[r] = ranks[r]->Reduce(values, kNcclBf16, kNcclSum, "bf16");
    values.clear();
    for (const float value : ValuesOf(r)) values.push_back(ToF16(value));
    f16[r] = ranks[r]->Reduce(values, kNcclF16, kNcclSum, "f16");
  });
  EXPECT_EQ(bf16[0], bf16[1]);
  EXPECT_EQ(f16[0], f16[1]);
  const std::vector<float> exact = ExactSum(2);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(FromBf16(bf16[0][i]), exact[i], 0.05f);
    EXPECT_NEAR(FromF16(f16[0][i]), exact[i], 0.05f);
  }
}

// Later steps bring what one step lost: the sum of many results is as close as a single one.
// Without residuals every step loses the same.
TEST_F(NcclShimTest, ResidualsOfABufferAreKept) {
  constexpr int kSteps = 20;
  for (const bool feedback : {true, false}) {
    Ranks ranks = RanksWith(2, [&](int) {
      Environment environment = OptedIn("int4");
      if (feedback) environment["THINWIRE_NCCL_FEEDBACK_BYTES"] = "1000000";
      return environment;
    });
    std::vector<float> total(kCount);
    OnRanks(ranks, [&](int r) {
      for (int step = 0; step < kSteps; ++step) {
        const std::vector<float> sum = ranks[r]->Sum(ValuesOf(r), "one");
        ranks[r]->Sum(std::vector<float>(2 * kCount, 1.0f), "another");
        for (size_t i = 0; r == 0 && i < kCount; ++i) total[i] += sum[i];
      }
    });
    std::vector<float> exact = ExactSum(2);
    for (float& value : exact) value *= kSteps;
    if (feedback) {
      EXPECT_LT(LargestError(total, exact), 1.0f);
    } else {
      EXPECT_GT(LargestError(total, exact), 2.0f);
    }
  }
}

// A chunk of 8 Mi elements and one of the remainder.
TEST_F(NcclShimTest, LargeBuffersGoInChunks) {
  if (kSanitized) GTEST_SKIP() << "it takes 10 s, and does nothing that smaller ones do not";
  constexpr size_t kMany = size_t{11} << 20;
  Ranks ranks = RanksWithCodec(2, "int8");
  std::vector<float> first(2), last(2);
  const int groups = Fake().groups;
  OnRanks(ranks, [&](int r) {
    const std::vector<float> sum = ranks[r]->Sum(std::vector<float>(kMany, 1.0f + r));
    first[r] = sum.front();
    last[r] = sum.back();
  });
  EXPECT_NEAR(first[0], 3.0f, 0.05f);
  EXPECT_NEAR(last[1], 3.0f, 0.05f);
  EXPECT_GE(Fake().groups - groups, 2 * 2 * 2) << "two hops of two chunks on two ranks";
}

// Each of these calls goes to NCCL, and its result is exact.
TEST_F(NcclShimTest, AllElsePasses) {
  Ranks ranks = RanksWithCodec(2, "int8");
  OnRanks(ranks, [&](int r) {
    ShimRank& rank = *ranks[r];
    const std::vector<float> values = ValuesOf(r), exact = ExactSum(2);
    constexpr auto kMax = static_cast<NcclReduceOp>(2);
    constexpr auto kInt32 = static_cast<NcclDataType>(2);
    std::vector<float> largest = ValuesOf(1 - r);
    for (size_t i = 0; i < kCount; ++i) largest[i] = std::max(largest[i], values[i]);
    EXPECT_EQ(rank.Reduce(values, kNcclF32, kMax), largest);
    const std::vector<int> ints(kCount, r + 1);
    EXPECT_EQ(rank.Reduce(ints, kInt32, kNcclSum, "ints"), std::vector<int>(kCount, 3));
    const std::vector<float> few(values.begin(), values.begin() + 255);
    const std::vector<float> few_exact(exact.begin(), exact.begin() + 255);
    EXPECT_EQ(rank.Sum(few, "few"), few_exact);
    EXPECT_EQ(rank.said(), "") << "nobody has been asked yet";

    EXPECT_EQ(rank.shim().GroupStart(), kNcclOk);
    EXPECT_EQ(rank.shim().GroupStart(), kNcclOk);
    EXPECT_EQ(rank.shim().GroupEnd(), kNcclOk);
    const DeviceMemory memory = *rank.device().Allocate(kCount * sizeof(float));
    rank.stream().Copy(memory.get(), values.data(), kCount * sizeof(float));
    EXPECT_EQ(rank.shim().Reduce({Collective::kAllReduce, memory.get(), memory.get(), kCount,
                                  kNcclF32, kNcclSum, rank.comm, rank.stream().handle()}),
              kNcclOk);
    EXPECT_EQ(rank.shim().GroupEnd(), kNcclOk);
    std::vector<float> grouped(kCount);
    rank.stream().Copy(grouped.data(), memory.get(), kCount * sizeof(float));
    EXPECT_TRUE(rank.stream().Synchronize(Clock::now() + std::chrono::seconds(20)).ok());
    EXPECT_EQ(grouped, exact);
    EXPECT_EQ(rank.said(), "");
    EXPECT_NE(rank.Sum(values), exact) << "the group has ended";
  });
}

TEST_F(NcclShimTest, CapturedCallsPass) {
  Ranks ranks = RanksWithCodec(2, "int8");
  WatchedDevices::capturing = 1;
  OnRanks(ranks, [&](int r) { EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)), ExactSum(2)); });
  WatchedDevices::capturing = 0;
  OnRanks(ranks, [&](int r) { EXPECT_NE(ranks[r]->Sum(ValuesOf(r)), ExactSum(2)); });
}

// Without an opt-in the shim asks and says nothing.
TEST_F(NcclShimTest, WithoutAnOptInNothingChanges) {
  const int made = Fake().made;
  Ranks ranks = RanksWith(2, [](int) { return Environment(); });
  NcclUniqueId id = NewId(*ranks[0]);
  EXPECT_FALSE(MeetingOf(id).has_value());
  OnRanks(ranks, [&](int r) {
    EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)), ExactSum(2));
    EXPECT_EQ(ranks[r]->said() + ranks[r]->shim().Report(), "");
  });
  EXPECT_EQ(Fake().made, made + 2);
}

TEST_F(NcclShimTest, CommunicatorsOfOtherSizesPass) {
  Ranks ranks = RanksWith(2, [](int) {
    Environment environment = OptedIn();
    environment["THINWIRE_NCCL_RANKS"] = "3";
    return environment;
  });
  OnRanks(ranks, [&](int r) { EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)), ExactSum(2)); });
}

TEST_F(NcclShimTest, AnErrorOfNcclIsTheProgramsToo) {
  Ranks ranks = RanksWithCodec(2, "int8");
  OnRanks(ranks, [&](int r) { ranks[r]->Sum(ValuesOf(r)); });
  OnRanks(ranks, [&](int r) {
    ranks[r]->Sum(ValuesOf(r));
    Fake().launch_error = kNcclRemoteError;
    ranks[r]->Sum(ValuesOf(r));
    EXPECT_EQ(ranks[r]->result, kNcclRemoteError);
    EXPECT_TRUE(absl::StrContains(ranks[r]->said(), "remote process exited")) << ranks[r]->said();
  });
  Fake().launch_error = 0;
}

TEST_F(NcclShimTest, AnUnalignedAddressIsAnError) {
  Ranks ranks = RanksWithCodec(2, "int8");
  OnRanks(ranks, [&](int r) {
    ShimRank& rank = *ranks[r];
    const DeviceMemory memory = *rank.device().Allocate(kCount * sizeof(float) + 1);
    EXPECT_EQ(rank.shim().Reduce({Collective::kAllReduce, memory.get() + 1, memory.get() + 1,
                                  kCount, kNcclF32, kNcclSum, rank.comm, rank.stream().handle()}),
              kNcclInvalidArgument);
    EXPECT_TRUE(absl::StrContains(rank.said(), "align it")) << rank.said();
  });
}

// If a peer is gone its kernels keep waiting, until the program aborts, as without the shim.
TEST_F(NcclShimTest, AnAbortEndsWhatHangs) {
  Ranks ranks = RanksWithCodec(2, "int8");
  const NcclUniqueId id = NewId(*ranks[0]);
  const DeviceMemory memory = *ranks[0]->device().Allocate(kCount * sizeof(float));
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      ShimRank& rank = *ranks[r];
      EXPECT_EQ(rank.shim().CommInitRank(&rank.comm, 2, id, r), kNcclOk);
      rank.Sum(ValuesOf(r));
      if (r == 1) return;
      EXPECT_EQ(rank.shim().Reduce({Collective::kAllReduce, memory.get(), memory.get(), kCount,
                                    kNcclF32, kNcclSum, rank.comm, rank.stream().handle()}),
                kNcclOk)
          << "it is queued";
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : ranks) EXPECT_EQ(rank->shim().CommAbort(rank->comm), kNcclOk);
  EXPECT_EQ(WatchedDevices::allocated, 0);
  EXPECT_TRUE(ranks[0]->stream().Synchronize(Clock::now() + std::chrono::seconds(20)).ok());
}

TEST_F(NcclShimTest, AFunctionThatIsNotThereIsSaid) {
  std::string said;
  NcclShim shim({}, {.next = {}, .load_nccl = {}, .open_device = {}, .say = [&](const auto& line) {
                       said += line;
                     }});
  EXPECT_EQ(shim.Reduce({}), kNcclInvalidUsage);
  EXPECT_EQ(shim.Reduce({.collective = Collective::kReduceScatter, .config = &said}),
            kNcclInvalidUsage);
  EXPECT_EQ(shim.GroupSimulateEnd(nullptr), kNcclInvalidUsage);
  for (const char* word : {"no ncclAllReduce ", "no ncclReduceScatterConfig ",
                           "no ncclGroupSimulateEnd", "shared library"}) {
    EXPECT_TRUE(absl::StrContains(said, word)) << word << " in " << said;
  }
}

// Elements are encoded between nodes; the GPUs decide how they go inside a node.
TEST_F(NcclShimTest, NodesOfSeveralRanksGoByNodes) {
  const auto meets_in_host_memory = [](int ordinal) {
    kernels::DeviceApi api = WatchedDevices::Api();
    api.reaches_peers = [](int, int* least) { return *least = 0, 0; };
    static const kernels::DeviceApi kept = api;
    return MakeDevice(kept, ordinal, "host:" + std::to_string(ordinal));
  };
  for (const bool direct : {true, false}) {
    Ranks ranks = RanksWith(
        6, [](int) { return OptedIn("int8"); }, 3);
    if (!direct) ranks[4]->open_device = meets_in_host_memory;
    std::vector<std::vector<float>> sums(6);
    OnRanks(ranks, [&](int r) { sums[r] = ranks[r]->Sum(ValuesOf(r)); });
    const char* way = direct ? "hierarchical: 2 nodes of 3 ranks" : "grid: 2 x 3 ranks";
    for (int r = 0; r < 6; ++r) {
      EXPECT_EQ(sums[r], sums[0]) << "rank " << r;
      EXPECT_TRUE(absl::StrContains(ranks[r]->said(), way)) << ranks[r]->said();
    }
    EXPECT_GT(LargestError(sums[0], ExactSum(6)), 0.0f);
    EXPECT_LT(LargestError(sums[0], ExactSum(6)), 0.12f);
  }
}

TEST_F(NcclShimTest, ReduceScattersAreCompressedOnRequest) {
  constexpr size_t kEach = 1500;  // not whole blocks
  for (const bool asked : {true, false}) {
    Ranks ranks = RanksWith(3, [&](int) {
      Environment environment = OptedIn("int8");
      if (asked) environment["THINWIRE_NCCL_REDUCE_SCATTER"] = "1";
      return environment;
    });
    const std::vector<float> exact = ExactSum(3, 3 * kEach);
    OnRanks(ranks, [&](int r) {
      const std::vector<float> own(exact.begin() + r * kEach, exact.begin() + (r + 1) * kEach);
      for (const bool in_place : {false, true}) {
        const std::vector<float> part = ranks[r]->Scatter(ValuesOf(r, 3 * kEach), r, 3, in_place);
        EXPECT_EQ(ranks[r]->result, kNcclOk);
        EXPECT_EQ(part != own, asked) << "int8 loses something, and NCCL's own sum does not";
        EXPECT_LT(LargestError(part, own), 0.05f);
      }
    });
  }
}

// Calls that programs for NCCL 2.31 may make.
TEST_F(NcclShimTest, CallsWithAConfigurationAreAsThoseWithout) {
  constexpr size_t kConfig = 64;  // the struct's size is its first field
  for (const bool opted_in : {true, false}) {
    Ranks ranks = RanksWith(2, [&](int) { return opted_in ? OptedIn("int8") : Environment(); });
    const int configured = Fake().configured;
    OnRanks(ranks, [&](int r) {
      ranks[r]->config = &kConfig;
      EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)) != ExactSum(2), opted_in);
      EXPECT_LT(ranks[r]->Scatter(ValuesOf(r), r, 2)[0] - ExactSum(2)[r * kCount / 2], 1e-6f);
      EXPECT_EQ(ranks[r]->result, kNcclOk);
    });
    EXPECT_EQ(Fake().configured - configured, opted_in ? 2 : 4) << "those that passed";
  }
}

// Two groups of communicators in one process work at the same time, each rank on its own thread.
TEST_F(NcclShimTest, CommunicatorsAreIndependent) {
  Ranks ranks = RanksWithCodec(4, "int8");
  Ranks others = RanksWithCodec(2, "int4");
  const FakeBehaves busy(&FakeNccl::launch_us, 2);
  std::thread beside([&] {
    OnRanks(others, [&](int r) {
      for (int step = 0; step < 5; ++step) {
        EXPECT_LT(LargestError(others[r]->Sum(ValuesOf(r)), ExactSum(2)), 0.8f);
      }
    });
  });
  OnRanks(ranks, [&](int r) {
    for (int step = 0; step < 5; ++step) {
      EXPECT_LT(LargestError(ranks[r]->Sum(ValuesOf(r)), ExactSum(4)), 0.1f);
    }
  });
  beside.join();
}

TEST_F(NcclShimTest, ACommunicatorThatDoesNotBlockIsAwaited) {
  Ranks ranks = RanksWithCodec(2, "int8");
  const NcclUniqueId id = NewId(*ranks[0]);
  const FakeBehaves busy(&FakeNccl::launch_us, 3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      ShimRank& rank = *ranks[r];
      NcclConfig config;
      EXPECT_EQ(rank.shim().CommInitRankConfig(&rank.comm, 2, id, r, &config), kNcclInProgress);
      NcclResult state = kNcclInProgress;
      while (state == kNcclInProgress)
        (*LoadNccl(THINWIRE_FAKE_NCCL))->comm_get_async_error(rank.comm, &state);
      EXPECT_LT(LargestError(rank.Sum(ValuesOf(r)), ExactSum(2)), 0.05f);
      EXPECT_EQ(rank.shim().CommAbort(rank.comm), kNcclOk);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(NcclShimTest, AnObserverCountsAndChangesNothing) {
  Ranks ranks = RanksWith(2, [](int) {
    return Environment{{"THINWIRE_NCCL_OBSERVE", "1"}, {"THINWIRE_NCCL_MIN_BYTES", "4096"}};
  });
  OnRanks(ranks, [&](int r) {
    for (int step = 0; step < 3; ++step) EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)), ExactSum(2));
    ranks[r]->Sum(std::vector<float>(8), "few");
    ranks[r]->Reduce(std::vector<int>(8), static_cast<NcclDataType>(2), kNcclSum, "ints");
    ranks[r]->shim().GroupStart();
    ranks[r]->shim().GroupEnd();
  });
  const std::string report = ranks[0]->shim().Report();
  // 3 calls of 20,000 bytes between two ranks.
  for (const char* words : {"3 could go compressed", "1 smaller than", "1 of other elements",
                            "4 of f32, below 64 KiB: 0.1 MB", "0.1 MB by NCCL's ring",
                            "as int8 (3.97 x less)", "as int4 (7.88 x less)", "10 Gb/s"}) {
    EXPECT_TRUE(absl::StrContains(report, words)) << words << " in " << report;
  }
}

// By NCCL's ring a node sends 2 (n - 1) / n of all bytes; in the exchange by nodes each of its
// ranks sends its row's part. Here that is 6 bytes per element, against 1.0078 or 0.5078.
TEST_F(NcclShimTest, AnObserverCountsWhatNodesSend) {
  Ranks ranks = RanksWith(4, [](int) {
    return Environment{{"THINWIRE_NCCL_OBSERVE", "1"},
                       {"THINWIRE_NCCL_MIN_BYTES", "4096"},
                       {"LOCAL_WORLD_SIZE", "2"}};
  });
  OnRanks(ranks, [&](int r) { ranks[r]->Sum(ValuesOf(r)); });
  const std::string report = ranks[0]->shim().Report();
  for (const char* words :
       {"a node of 2 ranks sends", "as int8 (5.95 x less)", "as int4 (11.82 x less)"}) {
    EXPECT_TRUE(absl::StrContains(report, words)) << words << " in " << report;
  }
}

// Freeing memory waits for all work of the device, as cudaFree does. That includes exchanges of
// other communicators, whose peers may be waiting in the same way.
TEST_F(NcclShimTest, NothingIsFreedBeforeTheEnd) {
  Ranks ranks = RanksWithCodec(2, "int8");
  Ranks divided = RanksWith(2, [](int r) { return OptedIn(r == 0 ? "int8" : "int4"); });
  for (Ranks* all : {&ranks, &divided}) {
    OnRanks(*all, [&](int r) {
      const int released = WatchedDevices::released[r];
      (*all)[r]->Sum(ValuesOf(r));
      EXPECT_EQ(WatchedDevices::released[r], released);
    });
  }
  EXPECT_TRUE(absl::StrContains(divided[0]->said(), "goes on uncompressed")) << divided[0]->said();
}

constexpr size_t kNumel = 1000;

TEST(NcclBuffersTest, WhatIsKeptIsBounded) {
  const std::shared_ptr<Device> device = MakeDevice(WatchedDevices::Api(), 0, "host:0");
  const std::unique_ptr<DeviceStream> stream = *device->MakeStream();
  const int released = WatchedDevices::released[0];
  constexpr size_t kBytes = kNumel * sizeof(float);
  Options options;
  options.codecs = {*CodecPair::Parse("int4")};
  NcclBuffers buffers(*device, 2, options, 2 * kBytes);
  ASSERT_TRUE(buffers.Prepare().ok());
  const auto use = [&](uintptr_t address, size_t numel = kNumel) -> NcclBuffers::Buffer& {
    return buffers.Use({reinterpret_cast<void*>(address), numel, DType::kF32, Op::kSum}, *stream);
  };
  use(1);
  use(2);
  EXPECT_EQ(use(1).uses, 1u);
  use(3);
  EXPECT_EQ(buffers.residual_bytes(), 2 * kBytes);
  EXPECT_EQ(use(1).uses, 2u) << "the other one was used less lately";
  EXPECT_EQ(use(2).uses, 0u) << "it had to go";
  EXPECT_EQ(use(4, 3 * kNumel).residual, nullptr) << "it is larger than all that may be kept";
  for (uintptr_t address = 10; address < 6000; ++address) use(address, 3 * kNumel);
  EXPECT_LE(buffers.residual_bytes(), 2 * kBytes);
  EXPECT_EQ(WatchedDevices::released[0], released) << "another communicator's work is waited for";
}

TEST(NcclBuffersTest, WhatGoesLeavesItsRoom) {
  const std::shared_ptr<Device> device = DeviceOfRank(0);
  const std::unique_ptr<DeviceStream> stream = *device->MakeStream();
  Options options;
  options.codecs = {*CodecPair::Parse("int4")};
  NcclBuffers buffers(*device, 2, options, 3 * kNumel * sizeof(float));
  ASSERT_TRUE(buffers.Prepare().ok());
  const auto use = [&](uintptr_t address, size_t numel) -> NcclBuffers::Buffer& {
    return buffers.Use({reinterpret_cast<void*>(address), numel, DType::kF32, Op::kSum}, *stream);
  };
  const auto synchronize = [&] {
    EXPECT_TRUE(stream->Synchronize(Clock::now() + std::chrono::seconds(20)).ok());
  };
  auto* const large = reinterpret_cast<float*>(use(1, 2 * kNumel).residual.get());
  synchronize();
  std::fill_n(large, 2 * kNumel, 1.0f);
  use(2, kNumel);
  auto* const next = reinterpret_cast<float*>(use(3, kNumel + 1).residual.get());
  synchronize();
  EXPECT_EQ(next, large) << "only that one is large enough";
  EXPECT_EQ(std::count(next, next + kNumel + 1, 0.0f), kNumel + 1);
  EXPECT_EQ(use(4, 3 * kNumel).residual, nullptr) << "nothing that large has been";
  EXPECT_EQ(use(2, kNumel).uses, 1u) << "it stays, since it would not have been enough";
}

}  // namespace
}  // namespace thinwire
