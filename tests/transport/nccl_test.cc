// NCCL's data plane alone, over the fake library: how ranks connect or fail to, which exchanges are
// gathers, and how a communicator ends. data_plane_test tests the contract of all planes.
#include "transport/nccl/nccl.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/join/planes.h"
#include "tests/kernels/devices.h"
#include "tests/transport/connect_nccl.h"
#include "transport/nccl/nccl_comm.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class NcclTest : public testing::Test {
 protected:
  void SetUp() override { misuses_ = Fake().misuses; }
  void TearDown() override { EXPECT_EQ(Fake().misuses, misuses_); }

 private:
  int misuses_ = 0;
};

bool Says(const absl::Status& status, const std::string& word) {
  return absl::StrContains(status.message(), word);
}

TEST_F(NcclTest, EveryWorldComesTogetherAndEndsInOrder) {
  for (int world = 1; world <= 8; ++world) {
    const int made = Fake().made, destroyed = Fake().destroyed, aborted = Fake().aborted;
    for (const auto& plane : ConnectNcclPlanes(world)) EXPECT_EQ(plane->bytes_sent(), 0u);
    EXPECT_EQ(Fake().made, made + world);
    EXPECT_EQ(Fake().destroyed, destroyed + world);
    EXPECT_EQ(Fake().aborted, aborted);
  }
}

// On an overloaded machine ranks may not even send their addresses in time, so each further attempt
// has more time.
TEST_F(NcclTest, ARankThatNcclRefusesSaysWhy) {
  const FakeBehaves refusing(&FakeNccl::refuses, 1);
  std::vector<absl::StatusOr<std::unique_ptr<StreamPlane>>> planes;
  for (milliseconds patience(300); patience < seconds(60); patience *= 4) {
    planes = TryNccl(3, patience);
    if (absl::IsUnimplemented(planes[1].status()) &&
        Says(planes[0].status(), "NCCL_SOCKET_IFNAME")) {
      break;
    }
  }
  EXPECT_TRUE(absl::IsUnimplemented(planes[1].status())) << planes[1].status();
  for (const char* word : {"rank 1", "NCCL 2.30.7", "fake failure", "last words", "host:1"}) {
    EXPECT_TRUE(Says(planes[1].status(), word)) << word << " in " << planes[1].status();
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(planes[0].status())) << planes[0].status();
  EXPECT_TRUE(Says(planes[0].status(), "NCCL_SOCKET_IFNAME")) << planes[0].status();
}

TEST_F(NcclTest, ARankThatNeverComesIsNamed) {
  Fake();
  std::vector<Transport> meeting = MakeInProcessTransports(2);
  const absl::Status status = ConnectNccl(NcclOptionsOf(meeting[0], milliseconds(100))).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(
      Says(status, "rank 0 could not tell all others its NCCL (address) in time: rank 1 did not"))
      << status;
}

// NCCL itself would wait for a rank that is gone.
TEST_F(NcclTest, ARankThatDiesWhileNcclConnectsIsALostPeer) {
  const int made = Fake().made;
  std::vector<Transport> meeting = MakeInProcessTransports(2);
  std::thread dying([&] {
    EXPECT_TRUE(TellerOf(NcclBoardOf(meeting[1], seconds(20)))(std::string()).ok());
    while (Fake().made == made) std::this_thread::sleep_for(milliseconds(1));
    meeting[1].Reset();
  });
  const absl::Status status = ConnectNccl(NcclOptionsOf(meeting[0])).status();
  dying.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(Says(status, "rank 1")) << status;
}

TEST_F(NcclTest, ConnectingOverKernelsThatHangIsADeadline) {
  const FakeBehaves hanging(&FakeNccl::hangs_from, 0);
  for (const auto& plane : TryNccl(2, milliseconds(300))) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(plane.status())) << plane.status();
  }
}

// Finalizing may wait for peers that are gone.
TEST_F(NcclTest, AnEndThatDoesNotComeIsAnAbort) {
  const FakeBehaves endless(&FakeNccl::never_final, 1);
  auto planes = ConnectNcclPlanes(2);
  const int aborted = Fake().aborted;
  planes.clear();
  EXPECT_EQ(Fake().aborted, aborted + 2);
}

// A rank that has aborted no longer writes pending blocks, although the peer sends them.
TEST_F(NcclTest, BlocksAreTheCallersAfterAFailure) {
  auto planes = ConnectNcclPlanes(2);
  const std::vector<uint8_t> out(1 << 20, 1);
  std::vector<uint8_t> in(1 << 20, 2);
  const auto exchange =
      planes[0]->Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2, in));
  EXPECT_TRUE(exchange->Wait(Clock::now() + seconds(20)).ok()) << "it is queued";
  const auto flush = planes[0]->Flush();
  EXPECT_TRUE(absl::IsDeadlineExceeded(flush->Wait(Clock::now() + milliseconds(50))));
  const auto late = planes[1]->Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2));
  late->Wait(Clock::now() + milliseconds(50)).IgnoreError();
  EXPECT_EQ(in, std::vector<uint8_t>(1 << 20, 2));
}

// Exchanges queued before the failure may still access their blocks.
TEST_F(NcclTest, AFlushAfterAFailureWaitsForTheDevice) {
  auto planes = ConnectNcclPlanes(2);
  const std::unique_ptr<DeviceStream> stream = *DeviceOfRank(0)->MakeStream();
  const std::unique_ptr<StreamPlane> lane = planes[0]->On(*stream);
  std::vector<uint8_t> block(100);
  std::promise<absl::Status> ended;
  std::future<absl::Status> end = ended.get_future();
  {
    const Held held(*stream);
    EXPECT_TRUE(lane->Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2, block))
                    ->Wait(Clock::now() + seconds(20))
                    .ok());
    lane->Abort(absl::AbortedError("enough"));
    lane->Flush()->OnDone([&](absl::Status status) { ended.set_value(std::move(status)); });
    EXPECT_EQ(end.wait_for(seconds(0)), std::future_status::timeout);
  }
  const absl::Status status = end.get();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
}

// Planes on other streams share this plane's failure, and the order of its exchanges.
TEST_F(NcclTest, StreamsShareOneCommunicator) {
  auto planes = ConnectNcclPlanes(2);
  std::vector<std::unique_ptr<DeviceStream>> streams;
  std::vector<std::unique_ptr<StreamPlane>> lanes;
  std::vector<std::shared_ptr<Device>> devices = DevicesOfRanks(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (int lane = 0; lane < 2; ++lane) {
      streams.push_back(*devices[rank]->MakeStream());
      lanes.push_back(planes[rank]->On(*streams.back()));
    }
  }
  const std::vector<uint8_t> first(100, 1), second(100, 2);
  std::array<std::vector<uint8_t>, 4> in;
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (int i = 0; i < 4; ++i) {
    in[i].resize(100);
    exchanges.push_back(lanes[i]->Start(i % 2, std::vector<Bytes>(2, i % 2 == 0 ? first : second),
                                        std::vector<MutableBytes>(2, in[i])));
  }
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(exchanges[i]->Wait(Clock::now() + seconds(20)).ok());
    EXPECT_TRUE(lanes[i]->Flush()->Wait(Clock::now() + seconds(20)).ok());
    EXPECT_EQ(in[i], i % 2 == 0 ? first : second);
  }
  EXPECT_EQ(planes[0]->bytes_sent(), 200u);
  lanes[0]->Abort(absl::AbortedError("enough"));
  EXPECT_TRUE(absl::IsAborted(planes[0]->status()));
  EXPECT_TRUE(absl::IsAborted(lanes[1]->Flush()->Wait(Clock::now() + seconds(20))));
}

// All memory is freed, and all registrations have ended.
void ExpectNothingLeft() {
  EXPECT_EQ(Fake().allocated, Fake().freed);
  EXPECT_EQ(Fake().registered, Fake().deregistered + Fake().ended_by_abort);
}

// Exchanges the blocks at these addresses between two planes, once.
void Swap(std::vector<std::unique_ptr<StreamPlane>>& planes, std::array<uint8_t*, 2> blocks) {
  for (int rank = 0; rank < 2; ++rank) std::memset(blocks[rank], 7 + rank, 16);
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (int rank = 0; rank < 2; ++rank) {
    exchanges.push_back(planes[rank]->Start(1, std::vector<Bytes>(2, Bytes(blocks[rank], 16)),
                                            std::vector<MutableBytes>(2, {blocks[rank] + 16, 16})));
    EXPECT_TRUE(exchanges.back()->Wait(Clock::now() + seconds(20)).ok());
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(planes[rank]->Flush()->Wait(Clock::now() + seconds(20)).ok());
    EXPECT_EQ(blocks[rank][16 + 15], 7 + (1 - rank));
  }
}

TEST_F(NcclTest, MemoryIsRegisteredUntilItIsFreed) {
  auto planes = ConnectNcclPlanes(2);
  const int registered = Fake().registered, deregistered = Fake().deregistered;
  const int groups = Fake().registered_groups;
  {
    std::array<DeviceMemory, 2> memory;
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(planes[rank]->traits().allocates);
      memory[rank] = *planes[rank]->Allocate(1000);
    }
    EXPECT_EQ(Fake().registered, registered + 2);
    EXPECT_EQ(Fake().deregistered, deregistered);
    Swap(planes, {memory[0].get(), memory[1].get()});
    EXPECT_EQ(Fake().registered_groups, groups + 2);
  }
  EXPECT_EQ(Fake().deregistered, deregistered + 2);
  ExpectNothingLeft();
}

// The communicator is destroyed after its registered memory, even if the plane is destroyed first.
TEST_F(NcclTest, MemoryMayOutliveItsPlane) {
  auto planes = ConnectNcclPlanes(2);
  const int destroyed = Fake().destroyed;
  DeviceMemory memory = *planes[0]->Allocate(1000);
  planes.clear();
  EXPECT_EQ(Fake().destroyed, destroyed + 1);
  memory.reset();
  EXPECT_EQ(Fake().destroyed, destroyed + 2);
  ExpectNothingLeft();
}

// NCCL ends the registrations of a communicator that it aborts; they must not be ended again.
TEST_F(NcclTest, MemoryIsFreedAfterAnAbort) {
  auto planes = ConnectNcclPlanes(2);
  DeviceMemory memory = *planes[0]->Allocate(1000);
  const auto exchange =
      planes[0]->Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2, {memory.get(), 100}));
  EXPECT_TRUE(exchange->Wait(Clock::now() + seconds(20)).ok()) << "it is queued";
  const int ended = Fake().ended_by_abort, deregistered = Fake().deregistered;
  const auto flush = planes[0]->Flush();
  EXPECT_TRUE(absl::IsDeadlineExceeded(flush->Wait(Clock::now() + milliseconds(50))));
  EXPECT_FALSE(planes[0]->Allocate(1000).ok());
  memory.reset();
  EXPECT_EQ(Fake().ended_by_abort, ended + 1);
  EXPECT_EQ(Fake().deregistered, deregistered);
  ExpectNothingLeft();
}

TEST_F(NcclTest, AnOldLibraryRegistersNothing) {
  ControlsOf(THINWIRE_OLD_NCCL).version = 21803;
  std::vector<std::unique_ptr<StreamPlane>> planes;
  for (auto& plane : TryNccl(2, seconds(20), THINWIRE_OLD_NCCL)) {
    ASSERT_TRUE(plane.ok()) << plane.status();
    EXPECT_FALSE((*plane)->traits().allocates);
    const auto memory = (*plane)->Allocate(1000);
    EXPECT_TRUE(absl::IsUnimplemented(memory.status())) << memory.status();
    planes.push_back(*std::move(plane));
  }
  std::array<uint8_t, 32> first, second;
  Swap(planes, {first.data(), second.data()});
  EXPECT_EQ(ControlsOf(THINWIRE_OLD_NCCL).misuses, 0);
}

// Registered and other memory can't be combined, so one rank decides for all.
TEST_F(NcclTest, OneRankThatCantRegisterSpeaksForAll) {
  using Behaviour = std::pair<std::atomic<int> FakeNccl::*, int>;
  for (const auto& [how, value] :
       {Behaviour(&FakeNccl::refuses_to_register, 1), Behaviour(&FakeNccl::registers_nothing, 1),
        Behaviour(&FakeNccl::most_bytes, 0)}) {
    const FakeBehaves refusing(how, value);
    auto planes = ConnectNcclPlanes(2);
    for (const auto& plane : planes) EXPECT_FALSE(plane->traits().allocates);
    std::array<uint8_t, 32> first, second;
    Swap(planes, {first.data(), second.data()});
    planes.clear();
    ExpectNothingLeft();
  }
}

TEST_F(NcclTest, MemoryThatIsNotToBeHadSaysWhatToDo) {
  const auto planes = ConnectNcclPlanes(2);
  {
    const FakeBehaves full(&FakeNccl::most_bytes, 0);
    const absl::Status status = planes[1]->Allocate(1000).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    for (const char* word : {"no 1000 bytes of host:1", "rank 1", "chunk_bytes"}) {
      EXPECT_TRUE(Says(status, word)) << word << " in " << status;
    }
  }
  const FakeBehaves refusing(&FakeNccl::refuses_to_register, 1);
  const absl::Status status = planes[1]->Allocate(1000).status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  for (const char* word : {"rank 1", "NCCL 2.30.7", "1000 bytes", "NCCL_LOCAL_REGISTER=0"}) {
    EXPECT_TRUE(Says(status, word)) << word << " in " << status;
  }
  EXPECT_TRUE(planes[0]->Allocate(1000).ok()) << "rank 0 has memory";
  ExpectNothingLeft();
}

// NCCL refuses registrations while it works on an exchange.
TEST_F(NcclTest, MemoryWaitsForABusyCommunicator) {
  const FakeBehaves busy(&FakeNccl::launch_us, 600);
  auto planes = ConnectNcclPlanes(2);
  std::array<uint8_t, 16> in{};
  const auto exchange =
      planes[0]->Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2, in));
  EXPECT_TRUE(planes[0]->Allocate(1000).ok());
  planes[0]->Abort(absl::AbortedError("enough"));
  exchange->Wait(Clock::now() + seconds(20)).IgnoreError();
}

using Words = std::vector<absl::StatusOr<std::string>>;

// Returns the choices of three ranks; `change` modifies a rank's options.
Words Choose(TransportKind kind, const std::function<void(int, ChoiceOptions&)>& change) {
  Fake();
  std::vector<Transport> transports = MakeInProcessTransports(3);
  Words words(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      ChoiceOptions options{.kind = kind,
                            .deadline = Clock::now() + seconds(20),
                            .timeout = seconds(20),
                            .device = DeviceOfRank(rank),
                            .ucx_library = "/nowhere/libucp.so.0",
                            .nccl_library = THINWIRE_FAKE_NCCL};
      change(rank, options);
      const DataPlane* const before = transports[rank].data.get();
      words[rank] = ChooseDataPlane(options, transports[rank]);
      EXPECT_EQ(transports[rank].data.get() != before,
                words[rank].ok() && absl::StartsWith(*words[rank], "nccl 2.30.7"));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return words;
}

// Expects that kNccl fails with `words` on all ranks, and that kAuto keeps Gloo.
void ExpectRefusal(std::initializer_list<const char*> words,
                   const std::function<void(int, ChoiceOptions&)>& change) {
  for (const auto& answer : Choose(TransportKind::kNccl, change)) {
    EXPECT_TRUE(absl::IsUnimplemented(answer.status())) << answer.status();
    for (const char* word : words) {
      EXPECT_TRUE(Says(answer.status(), word)) << word << " in " << answer.status();
    }
  }
  for (const auto& answer : Choose(TransportKind::kAuto, change)) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(*answer, "gloo over TCP");
  }
}

TEST_F(NcclTest, RanksWithGpusOfTheirOwnTakeIt) {
  for (const TransportKind kind : {TransportKind::kNccl, TransportKind::kAuto}) {
    for (const auto& answer : Choose(kind, [](int, ChoiceOptions&) {})) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(*answer, "nccl 2.30.7");
    }
  }
}

// While NCCL's kernels wait for a network they would take much of a GPU from other kernels.
TEST_F(NcclTest, KernelsAreBoundedBetweenNodes) {
  for (const int nodes : {1, 3}) {
    const auto answers = Choose(TransportKind::kNccl, [&](int rank, ChoiceOptions& options) {
      options.node = "node " + std::to_string(rank % nodes);
    });
    for (const auto& answer : answers) EXPECT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(Fake().newest_ctas, nodes == 1 ? 32 : 4);
  }
}

TEST_F(NcclTest, WhoRegistersNothingSaysSo) {
  const FakeBehaves refusing(&FakeNccl::refuses_to_register, 2);
  for (const auto& answer : Choose(TransportKind::kNccl, [](int, ChoiceOptions&) {})) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(*answer, "nccl 2.30.7, memory not registered");
  }
}

TEST_F(NcclTest, AllRanksSayWhoLacksWhat) {
  ExpectRefusal({"rank 2", "takes no part over NCCL", "/nowhere/libnccl.so.2", "gloo"},
                [](int rank, ChoiceOptions& options) {
                  if (rank == 2) options.nccl_library = "/nowhere/libnccl.so.2";
                });
  ExpectRefusal({"rank 1", "host memory"}, [](int rank, ChoiceOptions& options) {
    if (rank == 1) options.device = nullptr;
  });
  ExpectRefusal({"ranks 0 and 2 share one", "threads 0"}, [](int rank, ChoiceOptions& options) {
    if (rank == 2) options.device = DeviceOfRank(0);
  });
  ExpectRefusal({"checksum"}, [](int, ChoiceOptions& options) { options.host_memory = true; });
}

TEST_F(NcclTest, RanksShareADeviceWhereNcclIsSetSo) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  const auto answers = Choose(
      TransportKind::kNccl, [](int, ChoiceOptions& options) { options.device = DeviceOfRank(0); });
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (const auto& answer : answers) EXPECT_TRUE(answer.ok()) << answer.status();
}

TEST_F(NcclTest, MixedVersionsAreRefusedOnAllRanks) {
  const std::string other = testing::TempDir() + "/other_nccl." + std::to_string(getpid()) + ".so";
  std::filesystem::copy_file(THINWIRE_FAKE_NCCL, other);
  ControlsOf(other).version = 22105;
  ExpectRefusal({"expected 2.30.7", "rank 1 has 2.21.5"}, [&](int rank, ChoiceOptions& options) {
    if (rank == 1) options.nccl_library = other;
  });
  std::filesystem::remove(other);
}

// Ranks that wait for a rank refused by NCCL get the reason before their own deadline. Half of that
// time is NCCL's.
TEST_F(NcclTest, WhatNcclRefusesOneRankAllRanksHear) {
  const FakeBehaves refusing(&FakeNccl::refuses, 1);
  ExpectRefusal({"rank 1 takes no part over NCCL", "fake failure"},
                [](int, ChoiceOptions& options) { options.deadline = Clock::now() + seconds(6); });
}

TEST_F(NcclTest, AGatherIsOneArrayOfEqualBlocks) {
  std::array<uint8_t, 40> array, other;
  const auto recv = [&](std::array<size_t, 4> sizes) {
    std::vector<MutableBytes> blocks;
    for (size_t r = 0; r < 4; ++r) blocks.push_back({array.data() + 10 * r, sizes[r]});
    return blocks;
  };
  const auto in_place = recv({10, 10, 10, 10});
  const std::vector<Bytes> own(4, Bytes(array.data() + 20, 10));
  EXPECT_TRUE(IsGatherInPlace(2, own, in_place));
  EXPECT_FALSE(IsGatherInPlace(1, own, in_place)) << "rank 2's block is not its own";
  EXPECT_FALSE(IsGatherInPlace(2, own, recv({10, 10, 10, 9}))) << "sizes differ";
  EXPECT_FALSE(IsGatherInPlace(2, own, recv({10, 10, 0, 10}))) << "an all-to-all has no own block";
  EXPECT_FALSE(IsGatherInPlace(2, std::vector<Bytes>(4, Bytes(other.data(), 10)), in_place));
  auto apart = in_place;
  apart[3] = {other.data(), 10};
  EXPECT_FALSE(IsGatherInPlace(2, own, apart)) << "blocks lie apart";
}

}  // namespace
}  // namespace thinwire
