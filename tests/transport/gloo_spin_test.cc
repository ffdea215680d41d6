// Gloo's event loop must not spin: it skips an event whose connection a caller has locked, and gets
// the same event again at once. This program intercepts Gloo's calls of the C library, and counts
// the messages, and how often a thread asks for events without having read or written since.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/transport/gloo_ranks.h"

namespace {

std::atomic<long> idle_turns{0}, turns{0}, writes{0};
thread_local bool moved_bytes = true;

template <typename Function>
Function* Original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#pragma GCC visibility push(default)  // found before the C library's functions
extern "C" {

int epoll_wait(int fd, epoll_event* events, int capacity, int timeout) {
  static auto* const original = Original<int(int, epoll_event*, int, int)>("epoll_wait");
  const int ready = original(fd, events, capacity, timeout);
  if (ready > 0) {
    ++turns;
    if (!moved_bytes) ++idle_turns;  // since the last turn
    moved_bytes = false;
  }
  return ready;
}

ssize_t read(int fd, void* data, size_t bytes) {
  static auto* const original = Original<ssize_t(int, void*, size_t)>("read");
  moved_bytes = true;
  return original(fd, data, bytes);
}

ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  static auto* const original = Original<ssize_t(int, void*, size_t, int)>("recv");
  moved_bytes = true;
  return original(fd, data, bytes, flags);
}

ssize_t writev(int fd, const iovec* parts, int count) {
  static auto* const original = Original<ssize_t(int, const iovec*, int)>("writev");
  moved_bytes = true;
  ++writes;
  return original(fd, parts, count);
}

}  // extern "C"
#pragma GCC visibility pop

namespace thinwire {
namespace {

// The blocks are large enough to need many turns of the loop. Several threads per rank start them,
// like the lanes of an engine.
TEST(GlooSpin, TheLoopReadsOrWritesInEveryTurn) {
  constexpr int kRounds = 40, kLanes = 4;
  constexpr size_t kBytes = 1 << 20;
  std::vector<Transport> ranks = ConnectGlooRanks(2);
  idle_turns = turns = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    for (int lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([&plane = *ranks[rank].data, lane] {
        std::vector<uint8_t> out(kBytes), in(kBytes);
        const std::vector<Bytes> send(2, out);
        const std::vector<MutableBytes> recv(2, in);
        for (int round = 0; round < kRounds; ++round) {
          const auto exchange = plane.Start(round * kLanes + lane, send, recv);
          ASSERT_TRUE(exchange->Wait(Clock::now() + std::chrono::seconds(20)).ok());
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  RecordProperty("turns", static_cast<int>(turns));
  RecordProperty("idle_turns", static_cast<int>(idle_turns));
  // A lane's round ends by a turn of its rank's loop, and not before the round before it has ended.
  // One turn may end rounds of several lanes.
  ASSERT_GE(turns, 2 * kRounds) << "the loop's calls do not come by here";
  EXPECT_LE(idle_turns, turns / 100) << "of " << turns << " turns";
}

// Alone, each block would take a message and two notices, which is three writes. The number of
// blocks per message depends on when the second rank's loop continues.
TEST(GlooSpin, SmallBlocksThatAreReadyTogetherShareMessages) {
  constexpr int kBlocks = 100;
  constexpr size_t kBytes = 100;
  GlooRanks ranks(2);
  std::vector<uint8_t> out(kBytes);
  std::vector<std::vector<uint8_t>> in(2 * kBlocks, out);
  std::vector<std::unique_ptr<Exchange>> exchanges;
  writes = 0;
  {
    const Standstill first(ranks.links[0]->loop()), second(ranks.links[1]->loop());
    for (int i = 0; i < 2 * kBlocks; ++i) {
      exchanges.push_back(ranks.data[i % 2]->Start(i / 2, std::vector<Bytes>(2, out),
                                                   std::vector<MutableBytes>(2, in[i])));
    }
  }
  for (const auto& exchange : exchanges) {
    ASSERT_TRUE(exchange->Wait(Clock::now() + std::chrono::seconds(20)).ok());
  }
  RecordProperty("writes", static_cast<int>(writes));
  ASSERT_GT(writes, 0) << "the loop's calls do not come by here";
  EXPECT_LT(writes, 2 * kBlocks) << "for " << 2 * kBlocks << " blocks";
}

}  // namespace
}  // namespace thinwire
