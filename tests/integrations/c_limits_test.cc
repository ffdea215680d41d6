// A process that gets no more memory or threads: every rank gets a typed error, and none aborts.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"

namespace {

// How many threads this thread may still start, and whether its large allocations succeed.
thread_local int threads_left = 1 << 30;
thread_local bool memory_is_left = true;

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kInterposes = false;  // sanitizers define these functions themselves
#else
constexpr bool kInterposes = true;

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) noexcept {
  if (threads_left-- <= 0) return EAGAIN;
  static auto* const next = Next<decltype(pthread_create)>("pthread_create");
  return next(thread, attributes, run, argument);
}

extern "C" void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  static auto* const next = Next<decltype(aligned_alloc)>("aligned_alloc");
  return memory_is_left ? next(alignment, bytes) : nullptr;
}
#endif

namespace {

constexpr int kRanks = 2;
constexpr size_t kNumel = size_t{3} << 20;
constexpr int kTimeoutMs = 60000;

struct Outcome {
  tw_status status = TW_OK;
  std::string message;
};

class CLimits : public testing::TestWithParam<bool> {  // true: over Gloo; false: in process
 protected:
  void SetUp() override {
    if (!kInterposes) GTEST_SKIP() << "sanitizers start threads and take memory themselves";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Rank 1 may start `threads` threads while it connects. `memory`: it gets memory for residuals.
  std::vector<Outcome> Run(int threads, bool memory) {
    const std::string group = "limits" + std::to_string(++runs_);
    std::vector<Outcome> outcomes(kRanks);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        tw_options options;
        tw_options_init(&options);
        options.rank = rank;
        options.size = kRanks;
        options.timeout_ms = kTimeoutMs;
        options.group = group.c_str();
        if (GetParam()) {
          options.store_path = folder_.c_str();
        } else {
          options.local_group = group.c_str();
        }
        tw_comm* comm = nullptr;
        if (rank == 1) threads_left = threads;
        tw_status status = tw_comm_create(&options, &comm);
        std::vector<float> values(kNumel, 1.0f);
        tw_work* work = nullptr;
        if (rank == 1) memory_is_left = memory;
        if (status == TW_OK) {
          status = tw_all_reduce_async(values.data(), values.data(), kNumel, TW_F32, TW_MEAN, comm,
                                       nullptr, "t", 0, &work);
        }
        if (status == TW_OK) status = tw_wait(work);
        outcomes[rank] = {status, status == TW_OK ? "" : tw_last_error()};
        tw_comm_destroy(comm);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return outcomes;
  }

 private:
  const std::string folder_ = testing::TempDir() + "/thinwire_limits_" + std::to_string(getpid());
  int runs_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Over, CLimits, testing::Bool(),
                         [](const auto& info) { return info.param ? "Gloo" : "InProcess"; });

// Each of the rank's threads in turn fails to start.
TEST_P(CLimits, ARankThatCanStartNoThreadIsATypedErrorOnAll) {
  int threads = 0;
  for (bool starts = false; !starts; ++threads) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Outcome> outcomes = Run(threads, true);
    starts = outcomes[1].status == TW_OK;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(kTimeoutMs / 2));
    if (starts) break;
    EXPECT_EQ(outcomes[1].status, TW_OUT_OF_MEMORY) << outcomes[1].message;
    EXPECT_NE(outcomes[1].message.find("can't start another thread"), std::string::npos)
        << outcomes[1].message;
    EXPECT_NE(outcomes[0].status, TW_OK) << threads;
    EXPECT_NE(outcomes[0].message.find("rank 1"), std::string::npos) << outcomes[0].message;
  }
  EXPECT_GT(threads, 4);
}

TEST_P(CLimits, ARankWithoutMemoryForResidualsIsATypedErrorOnAll) {
  for (const Outcome& outcome : Run(1 << 30, false)) {
    EXPECT_EQ(outcome.status, TW_OUT_OF_MEMORY) << outcome.message;
    EXPECT_NE(outcome.message.find("rank 1, tensor 't': the host has no memory for"),
              std::string::npos)
        << outcome.message;
  }
}

}  // namespace
