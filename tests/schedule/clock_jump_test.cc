// The system clock is changed, as by NTP, while ranks wait: a group keeps its timeout. This program
// replaces the C library's clock_gettime and syscall, also for Abseil.
#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <ctime>
#include <thread>

#include "absl/status/status.h"
#include "tests/schedule/ranks.h"

namespace {

std::atomic<int64_t> g_jump_s{0};
constexpr int64_t kSlice_ns = 5'000'000;  // nanoseconds after which a wait reads the clock again

int64_t NanosUntil(const timespec& when) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (when.tv_sec - now.tv_sec) * 1'000'000'000 + (when.tv_nsec - now.tv_nsec);
}

}  // namespace

#pragma GCC visibility push(default)  // Abseil's shared libraries use them
extern "C" {

int clock_gettime(clockid_t id, timespec* time) noexcept {
  static const auto real =
      reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(id, time);
  if (id == CLOCK_REALTIME) time->tv_sec += g_jump_s;
  return result;
}

// The kernel ends a futex wait by its own clock; this function ends it by this program's.
long syscall(long number, ...) noexcept {
  static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long of[6];
  for (long& argument : of) argument = va_arg(list, long);
  va_end(list);
  const auto* const deadline = reinterpret_cast<const timespec*>(of[3]);
  if (number != SYS_futex || (of[1] & FUTEX_CLOCK_REALTIME) == 0 || deadline == nullptr) {
    return real(number, of[0], of[1], of[2], of[3], of[4], of[5]);
  }
  for (int64_t left; (left = NanosUntil(*deadline)) > 0;) {
    const timespec slice{0, std::min(left, kSlice_ns)};
    const long result =
        real(number, of[0], FUTEX_WAIT | (of[1] & FUTEX_PRIVATE_FLAG), of[2], &slice, 0, 0);
    if (result == 0 || errno != ETIMEDOUT) return result;
  }
  errno = ETIMEDOUT;
  return -1;
}

}  // extern "C"
#pragma GCC visibility pop

namespace thinwire {
namespace {

using std::chrono::seconds;

class ClockJumpTest : public testing::TestWithParam<Wire> {
 protected:
  void TearDown() override { g_jump_s = 0; }

  // Rank 1 never calls, and the clock jumps while rank 0 waits for rank 1.
  void ExpectTimeout(int64_t jump_s) {
    Options options = SmallChunks("int4");
    options.timeout = seconds(2);
    RunRanks(GetParam(), 2, options, [&](int rank, Engine& engine) {
      const auto begin = Clock::now();
      if (rank == 0) {
        std::thread jump([&] {
          std::this_thread::sleep_for(options.timeout / 4);
          g_jump_s += jump_s;
        });
        std::vector<float> values(1000);
        const absl::Status status = AllReduce(engine, values, "g");
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
        EXPECT_GE(Clock::now() - begin, options.timeout);
        jump.join();
      } else {
        while (engine.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      EXPECT_LT(Clock::now() - begin, options.timeout + seconds(30));
    });
  }
};

std::string WireName(const testing::TestParamInfo<Wire>& info) { return Name(info.param); }
INSTANTIATE_TEST_SUITE_P(All, ClockJumpTest, testing::Values(Wire::kInProcess, Wire::kGloo),
                         WireName);

TEST_P(ClockJumpTest, AClockThatIsSetBackProlongsNoTimeout) { ExpectTimeout(-60); }
TEST_P(ClockJumpTest, AClockThatIsSetAheadShortensNoTimeout) { ExpectTimeout(3600); }

}  // namespace
}  // namespace thinwire
