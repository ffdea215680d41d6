// The data plane of UCX between processes: lost and stopped peers, strangers, idle ranks, its
// effects on the process that loads it, and how ranks agree on it.
#include "transport/ucx/ucx.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <time.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "schedule/join/planes.h"
#include "tests/effort.h"
#include "tests/transport/connect_ucx.h"
#include "tests/transport/listening.h"
#include "tests/transport/rank_processes.h"
#include "transport/gloo/gloo.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class UcxProcesses : public RankProcesses {
 protected:
  void SetUp() override {
    if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
    RankProcesses::SetUp();
  }

  absl::StatusOr<Transport> ConnectPlanes(const GlooOptions& options) override {
    absl::StatusOr<Transport> transport = ConnectGloo(options);
    if (!transport.ok()) return transport;
    const absl::StatusOr<std::string> words = ChooseDataPlane({.kind = TransportKind::kUcx,
                                                               .deadline = options.deadline,
                                                               .timeout = std::chrono::seconds(20)},
                                                              *transport);
    if (!words.ok()) return words.status();
    EXPECT_EQ(words->substr(0, 3), "ucx") << *words;
    return transport;
  }
};

TEST_F(UcxProcesses, AKilledPeerIsLostAtOnce) {
  ExpectFailureAfter(SIGKILL, seconds(60), absl::StatusCode::kUnavailable);
}

TEST_F(UcxProcesses, AStoppedPeerIsATimeoutThatNamesIt) {
  ExpectFailureAfter(SIGSTOP, kShort, absl::StatusCode::kDeadlineExceeded);
}

// Returns the seconds of CPU time that this process has used.
double ProcessorTime() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

class UcxPlanes : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  }
};
// Ranks that wait for a late peer, to which no more can be sent, use almost no CPU time. The bound
// is a tenth of a polling thread's time.
TEST_F(UcxPlanes, WaitingTakesNoProcessorTime) {
  constexpr size_t kBytes = 16 << 20;
  std::vector<std::unique_ptr<DataPlane>> planes = ConnectUcxPlanes(2);
  std::vector<std::vector<uint8_t>> out(2, std::vector<uint8_t>(kBytes)), in = out;
  const auto start = [&](int rank) {
    return planes[rank]->Start(1, std::vector<Bytes>(2, out[rank]),
                               std::vector<MutableBytes>(2, in[rank]));
  };
  std::thread waiter([&] { EXPECT_TRUE(start(0)->Wait(Clock::now() + seconds(60)).ok()); });
  // The rank first sends as much as there is room for, which takes long on a busy machine.
  double used = 1.0;
  for (int second = 0; second < 20 && used > 0.1; ++second) {
    const double before = ProcessorTime();
    std::this_thread::sleep_for(seconds(1));
    used = ProcessorTime() - before;
  }
  EXPECT_LT(used, 0.1);
  EXPECT_TRUE(start(1)->Wait(Clock::now() + seconds(60)).ok());
  waiter.join();
}

// A rank that gave up may reuse its blocks: nothing is written to them, although the peer sends
// what was expected. Blocks that this rank could not send, because the peer took none, do not delay
// its end.
TEST_F(UcxPlanes, BlocksAreTheCallersAfterAFailure) {
  constexpr size_t kBytes = 16 << 20;
  std::vector<std::unique_ptr<DataPlane>> planes = ConnectUcxPlanes(2);
  const std::vector<uint8_t> out(kBytes, 1);
  std::vector<uint8_t> in(kBytes, 2);
  const auto exchange =
      planes[0]->Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2, in));
  EXPECT_TRUE(absl::IsDeadlineExceeded(exchange->Wait(Clock::now() + milliseconds(50))));
  const auto late = planes[1]->Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2));
  late->Wait(Clock::now() + milliseconds(200)).IgnoreError();
  planes[0].reset();
  EXPECT_EQ(in, std::vector<uint8_t>(kBytes, 2));
}

TEST_F(UcxPlanes, OpenNoPort) {
  const size_t before = ListeningSockets().size();
  const auto planes = ConnectUcxPlanes(2);
  EXPECT_EQ(ListeningSockets().size(), before);
}

// UCX has a debugging handler for SIGHUP, and sanitizers have handlers for crashes.
TEST(Ucx, LeavesTheHandlersOfSignalsAlone) {
  if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  struct sigaction now {};
  sigaction(SIGHUP, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

// Returns the results of ChooseDataPlane on three ranks; rank 2 loads `library`.
std::vector<absl::StatusOr<std::string>> Choose(TransportKind kind, const std::string& library) {
  std::vector<Transport> transports = MakeInProcessTransports(3);
  std::vector<std::future<absl::StatusOr<std::string>>> ranks;
  for (Transport& transport : transports) {
    ranks.push_back(std::async(std::launch::async, [&] {
      return ChooseDataPlane({.kind = kind,
                              .deadline = Clock::now() + seconds(20),
                              .timeout = seconds(20),
                              .ucx_library = transport.members().rank == 2 ? library : ""},
                             transport);
    }));
  }
  std::vector<absl::StatusOr<std::string>> answers;
  for (auto& rank : ranks) answers.push_back(rank.get());
  return answers;
}

TEST(UcxChoice, AllRanksStayWithGlooIfOneHasNoUcx) {
  if (kSanitized) GTEST_SKIP() << UcxIsHere();
  for (const auto& answer : Choose(TransportKind::kAuto, "/nowhere/libucp.so.0")) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(*answer, "gloo over TCP");
  }
}

TEST(UcxChoice, AllRanksSayWhoHasNoUcxIfItWasAskedFor) {
  if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  for (const auto& answer : Choose(TransportKind::kUcx, "/nowhere/libucp.so.0")) {
    EXPECT_TRUE(absl::IsUnimplemented(answer.status())) << answer.status();
    for (const char* word : {"rank 2", "/nowhere/libucp.so.0", "libucx0", "gloo"}) {
      EXPECT_NE(answer.status().message().find(word), absl::string_view::npos) << word;
    }
  }
}

TEST(UcxChoice, AutoTakesSharedMemoryOnOneHost) {
  if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  for (const auto& answer : Choose(TransportKind::kAuto, "")) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->substr(0, 4), "ucx ");
    EXPECT_NE(answer->find("over shared memory"), std::string::npos) << *answer;
  }
}

TEST(UcxChoice, AHostHasOneIdentity) {
  EXPECT_EQ(HostIdentity(), HostIdentity());
  EXPECT_GT(HostIdentity().size(), 40u);
}

}  // namespace
}  // namespace thinwire
