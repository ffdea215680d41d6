// How long a host is busy with an exchange over NCCL. The fake library's clock advances by a
// thread's queries to NCCL and its sleeps, not with the machine's load, so this program intercepts
// nanosleep. Also how much of a GPU an exchange occupies, and that a deadline holds if NCCL does
// not return.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "tests/effort.h"
#include "tests/transport/connect_nccl.h"
#include "transport/nccl/nccl.h"

namespace {

constexpr int kTimerSlackUs = 50;  // Linux's timer slack, which a sleep takes in addition
std::atomic<std::atomic<int>*> sleepers_clock{nullptr};

}  // namespace

#pragma GCC visibility push(default)  // found before the C library's function
extern "C" int nanosleep(const timespec* time, timespec* left) {
  using Function = int(const timespec*, timespec*);
  static auto* const original = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, "nanosleep"));
  if (std::atomic<int>* const clock = sleepers_clock) {
    *clock += static_cast<int>(time->tv_sec * 1'000'000 + time->tv_nsec / 1000) + kTimerSlackUs;
  }
  return original(time, left);
}
#pragma GCC visibility pop

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class NcclPaceTest : public testing::Test {
 protected:
  void SetUp() override { misuses_ = Fake().misuses; }
  void TearDown() override { EXPECT_EQ(Fake().misuses, misuses_); }

 private:
  int misuses_ = 0;
};

using Planes = std::vector<std::unique_ptr<StreamPlane>>;
using Exchanges = std::vector<std::unique_ptr<Exchange>>;

std::unique_ptr<Exchange> StartOn(DataPlane& plane, std::span<const uint8_t> out,
                                  std::span<uint8_t> in) {
  return plane.Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2, in));
}

void ExpectEnd(Exchanges& exchanges) {
  for (const auto& exchange : exchanges) {
    const absl::Status status = exchange->Wait(Clock::now() + seconds(20));
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_F(NcclPaceTest, AnExchangeTakesTheHostTwentyMicrosecondsBeyondNcclsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "waiting for a condition sleeps in this build (tests/tsan_absl.cc)";
#endif
  constexpr int kLaunchUs = 30, kExchanges = Rounds(200), kMostUs = 20;
  Planes planes = ConnectNcclPlanes(2);
  const FakeBehaves launches(&FakeNccl::launch_us, kLaunchUs);
  const std::vector<uint8_t> out(64, 1);
  std::array<std::vector<uint8_t>, 2> in = {std::vector<uint8_t>(64), std::vector<uint8_t>(64)};
  const int before = Fake().now_us;
  sleepers_clock = &Fake().now_us;
  for (int i = 0; i < kExchanges / 2; ++i) {
    Exchanges exchanges;
    for (int rank = 0; rank < 2; ++rank) exchanges.push_back(StartOn(*planes[rank], out, in[rank]));
    ExpectEnd(exchanges);
  }
  sleepers_clock = nullptr;
  EXPECT_LE((Fake().now_us - before) / kExchanges - kLaunchUs, kMostUs);
  for (const auto& plane : planes)
    EXPECT_TRUE(plane->Flush()->Wait(Clock::now() + seconds(20)).ok());
  EXPECT_EQ(in[0], out);
}

// Exchanges that start while NCCL is busy form one group, whatever the peer does, but a gather is a
// group of its own: within a group NCCL orders collectives itself.
TEST_F(NcclPaceTest, QueuedExchangesAreOneGroup) {
  constexpr int kNotYet = 1'000'000, kExchanges = 5, kGather = 3;
  constexpr size_t kBytes = 64;
  Planes planes = ConnectNcclPlanes(2);
  std::array<std::array<std::array<uint8_t, 2 * kBytes>, kExchanges>, 2> memory{};
  const auto start = [&](int rank, int i) {
    auto& blocks = memory[rank][i];
    uint8_t* const own = blocks.data() + (i == kGather ? rank * kBytes : 0);
    std::fill_n(own, kBytes, 10 * (rank + 1) + i);
    std::vector<MutableBytes> recv(2);
    if (i == kGather) {
      for (int r = 0; r < 2; ++r) recv[r] = {blocks.data() + r * kBytes, kBytes};
    } else {
      recv[1 - rank] = {blocks.data() + kBytes, kBytes};
    }
    return planes[rank]->Start(i, std::vector<Bytes>(2, Bytes(own, kBytes)), recv);
  };
  const int groups = Fake().groups, gathers = Fake().gathers;
  Exchanges exchanges;
  {
    const FakeBehaves busy(&FakeNccl::launch_us, kNotYet);
    const int before = Fake().now_us;
    exchanges.push_back(start(0, 0));
    // The plane's own thread may be the one that launches the group and polls for its end.
    while (Fake().now_us == before) std::this_thread::sleep_for(milliseconds(1));
  }
  for (int i = 1; i < kExchanges; ++i) exchanges.push_back(start(0, i));
  for (int i = 0; i < kExchanges; ++i) exchanges.push_back(start(1, i));
  Fake().now_us += kNotYet;
  ExpectEnd(exchanges);
  for (const auto& plane : planes)
    EXPECT_TRUE(plane->Flush()->Wait(Clock::now() + seconds(20)).ok());
  // Rank 0's groups: 0; 1 and 2; 3; 4. Rank 1 groups the exchanges queued while its driver sleeps:
  // at most one group each, and at least 0 to 2; 3; 4.
  EXPECT_LE(Fake().groups - groups, 4 + kExchanges);
  EXPECT_GE(Fake().groups - groups, 4 + 3);
  EXPECT_EQ(Fake().gathers - gathers, 2);
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < kExchanges; ++i) {
      const size_t at = i == kGather ? (1 - rank) * kBytes : kBytes;
      EXPECT_EQ(memory[rank][i][at], 10 * (2 - rank) + i) << "rank " << rank << ", exchange " << i;
    }
  }
}

// The plane's kernels wait for their peers while those of another library, such as torch's own
// NCCL, do so as well. Ranks queue the two in either order, so both must fit on a GPU.
TEST_F(NcclPaceTest, AnExchangeLeavesRoomForAnotherLibrarys) {
  const auto connect = [](int most_ctas) {
    std::vector<Transport> meeting = MakeInProcessTransports(2);
    Planes planes(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        NcclOptions options = NcclOptionsOf(meeting[r]);
        options.most_ctas = most_ctas;
        auto plane = ConnectNccl(options);
        EXPECT_TRUE(plane.ok()) << plane.status();
        if (plane.ok()) planes[r] = *std::move(plane);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return planes;
  };
  constexpr int kOthers = 32;
  const FakeBehaves small(&FakeNccl::most_ctas, kOthers + 4);
  for (const bool fits : {true, false}) {
    const std::vector<uint8_t> out(64, 1);
    std::array<std::vector<uint8_t>, 4> in;
    std::array<Planes, 2> both = {connect(kOthers), connect(fits ? 4 : kOthers)};
    Exchanges exchanges;
    int running = Fake().running;
    for (const auto& [rank, whose] : {std::pair(0, 0), {1, 1}, {0, 1}, {1, 0}}) {
      in[2 * rank + whose].resize(64);
      exchanges.push_back(StartOn(*both[whose][rank], out, in[2 * rank + whose]));
      if (rank != whose) continue;
      // The peer has not begun, so the kernel now occupies its device.
      for (++running; Fake().running < running;) std::this_thread::sleep_for(milliseconds(1));
    }
    ExpectEnd(exchanges);
    if (!fits) {
      while (Fake().waiting_for_ctas < 2) std::this_thread::sleep_for(milliseconds(1));
      for (const Planes& planes : both) {
        for (const auto& plane : planes) plane->Abort(absl::AbortedError("seen enough"));
      }
      continue;
    }
    for (const Planes& planes : both) {
      for (const auto& plane : planes) {
        EXPECT_TRUE(plane->Flush()->Wait(Clock::now() + seconds(20)).ok());
      }
    }
  }
}

// Makes the device hang until End, or until the end of the scope.
class DeviceHangs {
 public:
  DeviceHangs() { Fake().device_hangs = 1; }
  ~DeviceHangs() { End(); }
  // Waits until the abort that was held up has returned.
  void End() {
    Fake().device_hangs = 0;
    while (Fake().aborted < aborted_ + 1) std::this_thread::sleep_for(milliseconds(1));
  }

 private:
  const int aborted_ = Fake().aborted;
};

// ncclCommAbort waits for the whole device, where another library's kernel may hang.
TEST_F(NcclPaceTest, ADeadlineHoldsWhileAnAbortDoesNotComeBack) {
  Planes planes = ConnectNcclPlanes(2);
  std::vector<uint8_t> in(64);
  const int aborted = Fake().aborted;
  DeviceHangs hangs;
  Exchanges exchanges;
  exchanges.push_back(StartOn(*planes[0], in, in));
  ExpectEnd(exchanges);
  const absl::Status status = planes[0]->Flush()->Wait(Clock::now() + milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(Fake().aborted, aborted) << "it has not come back";
  hangs.End();
}

// Memory that NCCL may still write is kept; everything else continues after a few seconds.
TEST_F(NcclPaceTest, AnAbortThatDoesNotComeBackIsLeft) {
  Planes planes = ConnectNcclPlanes(2);
  DeviceMemory memory = *planes[0]->Allocate(64);
  const int freed = Fake().freed;
  DeviceHangs hangs;
  {
    const FakeBehaves busy(&FakeNccl::launch_us, 1'000'000'000);
    const auto exchange = StartOn(*planes[0], {memory.get(), 64}, {memory.get(), 64});
    const absl::Status status = exchange->Wait(Clock::now() + milliseconds(50));
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  }
  memory.reset();
  planes[0].reset();
  EXPECT_EQ(Fake().freed, freed);
}

}  // namespace
}  // namespace thinwire
