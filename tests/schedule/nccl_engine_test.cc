// Engines over NCCL's data plane, on devices of CPU threads and a fake library: results have the
// host's bits, no thread waits on the host, and every failure is a typed error on all ranks.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "schedule/collective/settle.h"
#include "schedule/join/links.h"
#include "tests/effort.h"
#include "tests/schedule/device_runs.h"
#include "tests/transport/connect_nccl.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::vector<Transport> NcclTransports(int world) {
  std::vector<Transport> transports = MakeInProcessTransports(world);
  std::vector<std::unique_ptr<StreamPlane>> planes = ConnectNcclPlanes(world);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return transports;
}

// Checks after every test that no call misused NCCL.
class NcclEngineTest : public testing::Test {
 protected:
  void SetUp() override { misuses_ = Fake().misuses; }
  void TearDown() override { EXPECT_EQ(Fake().misuses, misuses_); }

  static void ExpectTheHostsBits(Options options, const Case& run) {
    options.timeout = std::chrono::minutes(5);  // thousands of naps on a loaded machine
    EXPECT_EQ(Reduce(options, run, DevicesOfRanks(run.world), NcclTransports(run.world)),
              Reduce(options, run, {}));
  }

 private:
  int misuses_ = 0;
};

TEST_F(NcclEngineTest, EveryCodecGivesTheHostsBits) {
  for (const char* codec : {"fp32", "bf16", "int4", "int8:down=int4", "onebit"}) {
    for (const int world : {2, 3, 5, 8}) {
      SCOPED_TRACE(std::string(codec) + ", world " + std::to_string(world));
      ExpectTheHostsBits(SmallChunks(codec), {.world = world});
    }
  }
}

TEST_F(NcclEngineTest, LateKernelsAndBusyCommunicatorsGiveTheHostsBits) {
  const FakeBehaves late(&FakeNccl::late_us, 2000);
  for (const int launch_us : {0, 3, 600}) {
    if (kSanitized && launch_us == 0) continue;
    const FakeBehaves busy(&FakeNccl::launch_us, launch_us);
    ExpectTheHostsBits(SmallChunks("int4"), {.world = 4});
  }
}

TEST_F(NcclEngineTest, SmallTensorsGridsAndOtherTypesGiveTheHostsBits) {
  Options small = SmallChunks("int4");
  small.min_bytes = 1 << 20;
  ExpectTheHostsBits(small, {.world = 3, .numel = 3000, .dtype = DType::kBF16});
  Options grid = SmallChunks("int4");
  grid.topology = Topology::kGrid;
  ExpectTheHostsBits(grid, {.world = 4, .numel = 5001});
  Options momentum = SmallChunks("onebit");
  momentum.momentum = {0.9f, true};
  ExpectTheHostsBits(momentum, {.world = 3});
}

TEST_F(NcclEngineTest, PredictedStepsGiveTheHostsBits) {
  Options options = SmallChunks("int4");
  options.predict = Predict::kAlways;
  ExpectTheHostsBits(options, {.world = 3});
}

// Equal shards are contiguous, as ncclAllGather requires.
TEST_F(NcclEngineTest, TheSecondHopIsAGather) {
  for (const char* codec : {"fp32", "int4"}) {
    SCOPED_TRACE(codec);
    Options options = SmallChunks(codec);
    options.chunk_bytes = 1 << 16;
    const int groups = Fake().groups, gathers = Fake().gathers;
    ExpectTheHostsBits(options, {.world = 2, .numel = 1 << 16});
    EXPECT_EQ(2 * (Fake().gathers - gathers), Fake().groups - groups);  // the greeting also gathers
  }
}

// Even if kernels never end, all hops of the chunks in the window are issued.
TEST_F(NcclEngineTest, NobodyWaitsOnTheHost) {
  auto transports = NcclTransports(2);
  const int greetings = 2;
  const FakeBehaves hanging(&FakeNccl::hangs_from, greetings);
  Options options = SmallChunks("int4");
  options.timeout = seconds(60);
  const int before = Fake().groups;
  RunRanks(
      std::move(transports), options,
      [&](int rank, Engine& engine) {
        Tensor tensor(DeviceOfRank(rank), 40000);
        auto work = engine.Start({.input = {reinterpret_cast<float*>(tensor.data()), 10000},
                                  .output = {reinterpret_cast<float*>(tensor.data()), 10000},
                                  .key = "t"});
        ASSERT_TRUE(work.ok()) << work.status();
        // On both ranks: first hops of all chunks that have a lane, and some second hops.
        while (Fake().groups - before < 2 * (options.lanes + 2)) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        engine.Abort(absl::AbortedError("seen enough"));
        EXPECT_TRUE(absl::IsAborted((*work)->Wait())) << engine.Describe();
      },
      DevicesOfRanks(2));
}

// Expects every rank's call to fail within the timeout and its grace.
void ExpectEnd(int world, const Options& options, absl::StatusCode code, const char* word,
               const std::function<void(int, Engine&)>& meanwhile) {
  std::barrier all(world);
  RunRanks(
      NcclTransports(world), options,
      [&](int rank, Engine& engine) {
        const auto begin = Clock::now();
        Tensor tensor(DeviceOfRank(rank), 40000);
        const TensorView view{tensor.data(), 10000};
        const auto call = [&]() -> absl::Status {
          auto work = engine.Start({.input = view, .output = view, .key = "t"});
          return work.ok() ? (*work)->Wait() : work.status();
        };
        EXPECT_TRUE(call().ok());
        all.arrive_and_wait();
        meanwhile(rank, engine);
        // An error that NCCL reports may come after a call has ended; then the next call gets it.
        absl::Status status = call();
        while (status.ok() && Clock::now() - begin < options.timeout) status = call();
        EXPECT_EQ(status.code(), code) << "rank " << rank << ": " << status;
        EXPECT_NE(status.message().find(word), absl::string_view::npos) << status;
        EXPECT_LT(Clock::now() - begin, options.timeout + seconds(30));
        tensor.Read();          // the memory is the caller's again
        all.arrive_and_wait();  // else a rank without the reason would see this one as lost
      },
      DevicesOfRanks(world));
}

TEST_F(NcclEngineTest, KernelsThatHangAreADeadlineOnEveryRank) {
  Options options = SmallChunks("int4");
  options.timeout = seconds(3);  // also for the call that must succeed before
  const int aborted = Fake().aborted;
  ExpectEnd(3, options, absl::StatusCode::kDeadlineExceeded, "'t'",
            [](int, Engine&) { Fake().hangs_from = 0; });
  Fake().hangs_from = -1;
  EXPECT_EQ(Fake().aborted, aborted + 3);
}

TEST_F(NcclEngineTest, AnAsynchronousErrorOfOneRankIsEverybodys) {
  Options options = SmallChunks("int4");
  options.timeout = seconds(20);
  for (const auto& [error, code] :
       {std::pair(6, absl::StatusCode::kUnavailable), {3, absl::StatusCode::kInternal}}) {
    const FakeBehaves failing(&FakeNccl::async_error, error);
    ExpectEnd(3, options, code, "rank 1: NCCL 2.30.7",
              [](int, Engine&) { Fake().failing_rank = 1; });
    Fake().failing_rank = -1;
  }
}

TEST_F(NcclEngineTest, AbortEndsKernelsThatHang) {
  Options options = SmallChunks("int4");
  options.timeout = seconds(20);
  ExpectEnd(3, options, absl::StatusCode::kAborted, "enough", [](int rank, Engine& engine) {
    Fake().hangs_from = 0;
    if (rank == 1) engine.Abort(absl::AbortedError("enough"));
  });
  Fake().hangs_from = -1;
}

TEST_F(NcclEngineTest, TensorsOfTheHostAndChecksumsAreRefused) {
  auto transports = NcclTransports(2);
  const auto on_host =
      Engine::Create(Settle(SmallChunks("int4"), 2), std::move(transports[0]), nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(on_host.status())) << on_host.status();
  Options options = SmallChunks("int4");
  options.checksum = true;
  const auto checked =
      Engine::Create(Settle(options, 2), std::move(transports[1]), DeviceOfRank(1));
  EXPECT_TRUE(absl::IsUnimplemented(checked.status())) << checked.status();
}

// Returns how many groups a run issued, and how many of them moved registered memory.
std::pair<int, int> GroupsOf(const Options& options, const Case& run) {
  std::vector<Transport> transports = NcclTransports(run.world);
  const int groups = Fake().groups, registered = Fake().registered_groups;
  Reduce(options, run, DevicesOfRanks(run.world), std::move(transports));
  return {Fake().groups - groups, Fake().registered_groups - registered};
}

TEST_F(NcclEngineTest, EncodedBlocksLieInRegisteredMemory) {
  for (const char* codec : {"int4", "onebit", "topk:density=0.05", "adaptive"}) {
    SCOPED_TRACE(codec);
    const auto [groups, registered] = GroupsOf(SmallChunks(codec), {.world = 3});
    EXPECT_EQ(registered, groups);
  }
  Options small = SmallChunks("int4");
  small.min_bytes = 1 << 20;
  const auto [groups, registered] = GroupsOf(small, {.world = 3, .numel = 3000});
  EXPECT_EQ(registered, groups);
  EXPECT_EQ(Fake().allocated, Fake().freed);
  EXPECT_EQ(Fake().registered, Fake().deregistered + Fake().ended_by_abort);
}

// NCCL can't use a tensor's own memory at one end and registered memory at the other.
TEST_F(NcclEngineTest, TensorsThatGoAsTheyAreMeetNoRegisteredMemory) {
  const auto [groups, registered] = GroupsOf(SmallChunks("fp32"), {.world = 3});
  EXPECT_GT(groups, 0);
  EXPECT_EQ(registered, 0);
  Options nodes = SmallChunks("int4");
  nodes.topology = Topology::kHierarchical;
  nodes.local_size = 2;
  ExpectTheHostsBits(nodes, {.world = 4, .numel = 5001});
}

TEST_F(NcclEngineTest, NodesAsRowsOfAGridGiveTheHostsBits) {
  Options nodes = SmallChunks("int4");
  nodes.topology = Topology::kGrid;
  nodes.local_size = 2;
  ExpectTheHostsBits(nodes, {.world = 6, .numel = 5001});
}

// A flat exchange may send more over a node's network card than an uncompressed ring. If a rank's
// device reaches others only through host memory, elements inside nodes are encoded as well.
TEST_F(NcclEngineTest, DevicesOfSeveralNodesGoByNodes) {
  constexpr int kWorld = 4;
  for (const bool direct : {true, false}) {
    std::vector<Transport> transports = NcclTransports(kWorld);
    std::vector<ChosenTopology> chosen(kWorld, {Settle({}, 1), "", {}});
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kWorld; ++rank) {
      ranks.emplace_back([&, rank] {
        const Board board{
            "links", {rank, kWorld}, transports[rank], 0, Clock::now() + seconds(60), seconds(60)};
        Nodes nodes = NodesOf(kWorld, 2);
        nodes.direct = direct;
        Options options;  // kAuto has chosen NCCL for its transport
        options.codecs = {*CodecPair::Parse("int4")};
        options.transport = TransportKind::kAuto;
        auto choice = ChooseTopology(options, nodes, board);
        ASSERT_TRUE(choice.ok()) << choice.status();
        chosen[rank] = *std::move(choice);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    const std::string words =
        direct ? "hierarchical: 2 nodes of 2 ranks, as between GPUs of several nodes"
               : "grid: 2 x 2 ranks, as between GPUs of several nodes that meet in host memory";
    for (const ChosenTopology& one : chosen) {
      EXPECT_EQ(one.words, words);
      EXPECT_EQ(GoesByNodes(kWorld, *one.options), direct);
      EXPECT_EQ(GridFor(kWorld, *one.options).columns, 2);
      EXPECT_EQ(one.options->chunk_bytes, kGpuChunk);
    }
  }
}

// By formula an exchange there runs at 0.6 to 0.7 of the speed of NCCL's ring.
TEST_F(NcclEngineTest, OneNodeOfGpusWithNvLinkGainsNothing) {
  std::vector<Transport> transports = NcclTransports(2);
  const Board board{"links", {0, 2}, transports[0], 0, Clock::now() + seconds(60), seconds(60)};
  for (const bool linked : {true, false}) {
    Nodes nodes = NodesOf(2, 2);
    nodes.linked = linked;
    const auto choice = ChooseTopology(SmallChunks("int4"), nodes, board);
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->words.find("do not compress") != std::string::npos, linked) << choice->words;
  }
}

TEST_F(NcclEngineTest, ARankWithoutMemoryFailsTheRegistrationEverywhere) {
  std::vector<Transport> transports = NcclTransports(2);
  const FakeBehaves full(&FakeNccl::most_bytes, 0);
  RunRanks(
      std::move(transports), SmallChunks("int4"),
      [](int, Engine& engine) {
        const auto bucket = engine.Register({.key = "t", .numel = 10000});
        EXPECT_TRUE(absl::IsResourceExhausted(bucket.status())) << bucket.status();
      },
      DevicesOfRanks(2));
}

TEST_F(NcclEngineTest, AGroupEndsInOrder) {
  const int finished = Fake().destroyed, aborted = Fake().aborted;
  Reduce(SmallChunks("int4"), {.world = 3}, DevicesOfRanks(3), NcclTransports(3));
  EXPECT_EQ(Fake().destroyed, finished + 3);
  EXPECT_EQ(Fake().aborted, aborted);
}

}  // namespace
}  // namespace thinwire
