// A forked child shares the connections of its parent's communicators but has none of their
// threads. It can't use them, and its attempts must not affect the parent.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "tests/own_folder.h"

namespace {

// State of each rank before the fork.
struct Rank {
  tw_comm* comm = nullptr;
  tw_bucket* bucket = nullptr;
  std::vector<float> values = std::vector<float>(100000);
  std::vector<float> others = std::vector<float>(100000);

  // Starts a work and a use of the bucket, neither of which the peer has started yet.
  tw_work* StartBoth() {
    tw_work* work = nullptr;
    EXPECT_EQ(tw_all_reduce_async(values.data(), values.data(), values.size(), TW_F32, TW_MEAN,
                                  comm, nullptr, "h", 0, &work),
              TW_OK);
    EXPECT_EQ(tw_bucket_start(bucket, others.data(), others.data(), nullptr, nullptr, 0), TW_OK);
    return work;
  }
  void WaitForBoth(tw_work* work) {
    EXPECT_EQ(tw_wait(work), TW_OK) << tw_last_error();
    EXPECT_EQ(tw_bucket_wait(bucket), TW_OK) << tw_last_error();
  }
  tw_status AllReduce(size_t count) {
    return tw_all_reduce(values.data(), values.data(), count, TW_F32, TW_MEAN, comm, nullptr);
  }
};

class Fork : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/thinwire_fork_" + std::to_string(getpid());
    std::filesystem::create_directories(folder_);
    OnBothRanks([this](int rank) { Connect(rank); });
  }
  void TearDown() override {
    OnBothRanks([this](int rank) {
      tw_bucket_destroy(ranks_[rank].bucket);
      tw_comm_destroy(ranks_[rank].comm);
    });
    std::filesystem::remove_all(folder_);
  }

  static void OnBothRanks(const std::function<void(int)>& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }

  void Connect(int rank) {
    tw_options options;
    tw_options_init(&options);
    options.rank = rank;
    options.size = 2;
    options.store_path = folder_.c_str();
    Rank& own = ranks_[rank];
    ASSERT_EQ(tw_comm_create(&options, &own.comm), TW_OK) << tw_last_error();
    tw_bucket_info info{};
    info.struct_size = sizeof(info);
    info.name = "g";
    info.count = own.values.size();
    ASSERT_EQ(tw_bucket_create(own.comm, &info, &own.bucket), TW_OK) << tw_last_error();
  }

  void ExpectTheParentGoesOn() {
    OnBothRanks([this](int rank) {
      Rank& own = ranks_[rank];
      for (float& value : own.values) value = static_cast<float>(rank);
      EXPECT_EQ(own.AllReduce(own.values.size()), TW_OK) << tw_last_error();
      EXPECT_NEAR(own.values[0], 0.5f, 0.01f);
      EXPECT_EQ(own.AllReduce(4), TW_OK) << tw_last_error();  // goes raw
    });
  }

  // Returns the exit code of a child that runs `body`, which returns the number of the check that
  // failed. A child that hangs is killed.
  static int CodeOfChild(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(body());
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::string folder_;
  Rank ranks_[2];
};

bool Refused(tw_status status) {
  return status == TW_INVALID_ARGUMENT && std::strstr(tw_last_error(), "forked") != nullptr;
}

TEST_F(Fork, EveryCallOfAChildIsRefusedAtOnceAndItsParentGoesOn) {
  ExpectTheParentGoesOn();
  const int wrong = CodeOfChild([this] {
    Rank& own = ranks_[0];
    float* const x = own.values.data();
    tw_work* work = nullptr;
    tw_bucket* bucket = nullptr;
    tw_bucket_info info{};
    info.struct_size = sizeof(info);
    info.name = "h";
    info.count = 4;
    tw_stats stats;
    char text[64];
    size_t size = 0;
    int raw = 0, by_order = 0;
    const tw_residual_array array = {"g", "first", x, 4};
    const tw_status statuses[] = {
        own.AllReduce(own.values.size()),
        own.AllReduce(4),
        tw_reduce_scatter(x, x + 4, 2, TW_F32, TW_MEAN, own.comm, nullptr),
        tw_all_gather(x, x + 4, 2, TW_F32, own.comm, nullptr),
        tw_all_reduce_async(x, x, 4, TW_F32, TW_MEAN, own.comm, nullptr, "h", 0, &work),
        tw_bucket_create(own.comm, &info, &bucket),
        tw_bucket_start(own.bucket, x, x, nullptr, nullptr, 0),
        tw_comm_stats(own.comm, &stats),
        tw_comm_codec(own.comm, 0, text, sizeof(text)),
        tw_comm_goes_raw(own.comm, 4, TW_F32, &raw),
        tw_comm_matches_by_order(own.comm, &by_order),
        tw_comm_set_step(own.comm, 1),
        tw_comm_end_step(own.comm),
        tw_comm_forget_step(own.comm),
        tw_comm_describe(own.comm, text, sizeof(text), &size),
        tw_residual_count(own.comm, &size),
        tw_residual_info(own.comm, 0, text, sizeof(text), &size),
        tw_residual_get(own.comm, "g", x, x, nullptr, 4),
        tw_residual_set(own.comm, "g", x, x, nullptr, 4),
        tw_residual_get_all(own.comm, &array, 1),
        tw_residual_set_all(own.comm, &array, 1),
        tw_comm_fail(own.comm, TW_MISMATCH, "a reason"),
        tw_comm_abort(own.comm),
    };
    int number = 0;
    for (const tw_status status : statuses) {
      ++number;
      if (!Refused(status)) return number;
    }
    return 0;
  });
  EXPECT_EQ(wrong, 0) << "this call was not refused";
  ExpectTheParentGoesOn();
}

TEST_F(Fork, AWorkInFlightIsNotWaitedForInAChild) {
  Rank& own = ranks_[0];
  tw_work* const work = own.StartBoth();
  const int wrong = CodeOfChild([&] {
    if (!Refused(tw_bucket_wait(own.bucket))) return 1;
    if (!Refused(tw_bucket_wait_stream(own.bucket, nullptr))) return 2;
    if (!Refused(tw_wait(work))) return 3;
    tw_work_destroy(work);
    return 0;
  });
  EXPECT_EQ(wrong, 0);
  OnBothRanks(
      [&](int rank) { ranks_[rank].WaitForBoth(rank == 0 ? work : ranks_[1].StartBoth()); });
}

TEST_F(Fork, DestroyingInAChildLeavesTheParentAlone) {
  ASSERT_EQ(CodeOfChild([this] {
              for (Rank& own : ranks_) {
                tw_bucket_destroy(own.bucket);
                tw_comm_destroy(own.comm);
              }
              return 0;
            }),
            0);
  ExpectTheParentGoesOn();
}

TEST_F(Fork, AChildMayHaveAGroupOfItsOwn) {
  EXPECT_EQ(CodeOfChild([] {
              tw_options options;
              tw_options_init(&options);
              tw_comm* comm = nullptr;
              if (tw_comm_create(&options, &comm) != TW_OK) return 1;
              float x[3] = {1, 2, 3};
              if (tw_all_reduce(x, x, 3, TW_F32, TW_MEAN, comm, nullptr) != TW_OK) return 2;
              tw_comm_destroy(comm);
              return 0;
            }),
            0);
}

// Runs rank 0 in a process of its own that is killed after a step and leaves a child behind, such
// as a data loader's worker. The child lives until `end` is closed.
[[noreturn]] void BeKilledBesideAChild(tw_options options, const int (&end)[2]) {
  tw_comm* comm = nullptr;
  float x[4] = {};
  if (tw_comm_create(&options, &comm) != TW_OK ||
      tw_all_reduce(x, x, 4, TW_F32, TW_MEAN, comm, nullptr) != TW_OK) {
    _exit(1);
  }
  if (fork() == 0) {
    close(end[1]);
    char nothing = 0;
    _exit(static_cast<int>(read(end[0], &nothing, 1)));
  }
  kill(getpid(), SIGKILL);
  _exit(2);
}

TEST(ForkedChild, OfAKilledRankKeepsNoConnectionOpen) {
  const thinwire::OwnFolder folder;
  tw_options options;
  tw_options_init(&options);
  options.size = 2;
  options.timeout_ms = 20000;
  options.store_path = folder.path().c_str();
  int end[2];
  ASSERT_EQ(pipe(end), 0);
  const pid_t rank0 = fork();
  if (rank0 == 0) BeKilledBesideAChild(options, end);
  options.rank = 1;
  tw_comm* comm = nullptr;
  ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
  float x[4] = {};
  EXPECT_EQ(tw_all_reduce(x, x, 4, TW_F32, TW_MEAN, comm, nullptr), TW_OK) << tw_last_error();
  EXPECT_EQ(tw_all_reduce(x, x, 4, TW_F32, TW_MEAN, comm, nullptr), TW_PEER_LOST)
      << "not at once, but by the timeout: " << tw_last_error();
  tw_comm_destroy(comm);
  int status = 0;
  EXPECT_EQ(waitpid(rank0, &status, 0), rank0);
  EXPECT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
  close(end[1]);  // the child ends
  close(end[0]);
}

}  // namespace
