// Many callers at once, and tensors with more elements than an int can count.
//
// With a sanitizer a tenth of the exchanges is made. THINWIRE_TEST_ROUNDS sets the exchanges per
// caller; `make tsan-gloo` runs all of them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/effort.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

int RoundsToRun() {
  const char* const rounds = std::getenv("THINWIRE_TEST_ROUNDS");
  return rounds == nullptr ? Rounds(25000) : std::atoi(rounds);
}

// Tests the hand-offs between callers, lanes, the reader and the transport many times: each rank
// has a caller for every way that a tensor can take.
TEST(Parallel, AHundredThousandShortExchanges) {
  struct Caller {
    const char* key;
    size_t numel;
  };
  constexpr Caller kCallers[] = {{"raw", 5}, {"one hop", 600}, {"chunks", 3000}, {"two", 1025}};
  const int rounds = RoundsToRun();
  Options options = SmallChunks("int8");
  options.min_bytes = 1000;
  options.one_hop_bytes = 2000;
  RunRanks(Wire::kInProcess, 2, options, [&](int rank, Engine& engine) {
    std::vector<std::thread> threads;
    for (const Caller& caller : kCallers) {
      threads.emplace_back([&, caller] {
        std::vector<float> values(caller.numel);
        for (int round = 0; round < rounds; ++round) {
          // A block of equal values is encoded exactly, and so are its residuals.
          std::fill(values.begin(), values.end(), rank == 0 ? 127.0f : 254.0f);
          ASSERT_TRUE(AllReduce(engine, values, caller.key, Op::kSum).ok()) << engine.status();
          ASSERT_EQ(values.front(), 381.0f) << caller.key << ", round " << round;
          ASSERT_EQ(values.back(), 381.0f) << caller.key << ", round " << round;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

// Needs 10 GB of memory and a minute, so it runs only on request.
TEST(Parallel, TwoToThe31And17Elements) {
  if (std::getenv("THINWIRE_HUGE") == nullptr) {
    GTEST_SKIP() << "takes 10 GB of memory; set THINWIRE_HUGE=1";
  }
  constexpr size_t kNumel = (size_t{1} << 31) + 17;
  Options options;
  options.codecs = {*CodecPair::Parse("bf16")};
  options.timeout = std::chrono::minutes(5);
  RunRanks(Wire::kInProcess, 2, options, [&](int rank, Engine& engine) {
    const auto of = [](size_t i) { return static_cast<uint16_t>(0x3f80 + i % 127); };  // [1, 2)
    std::vector<uint16_t> values(kNumel);
    for (size_t i = 0; i < kNumel; ++i) values[i] = rank == 0 ? of(i) : 0;
    const TensorView view{values.data(), kNumel, DType::kBF16};
    auto work = engine.Start({.input = view, .output = view, .key = "huge", .op = Op::kSum});
    ASSERT_TRUE(work.ok()) << work.status();
    ASSERT_TRUE((*work)->Wait().ok()) << engine.status();
    size_t wrong = 0;
    for (size_t i = 0; i < kNumel; ++i) wrong += values[i] != of(i);
    EXPECT_EQ(wrong, 0u);
  });
}

}  // namespace
}  // namespace thinwire
