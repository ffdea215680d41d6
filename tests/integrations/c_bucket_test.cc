// Registered buckets, the halves of an allreduce, and the engine's description of itself, as a C
// caller sees them.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"

namespace {

constexpr int kWorld = 2;

// Calls body(rank, communicator) on one thread per rank of a local group.
void RunRanks(const char* group, const std::function<void(int, tw_comm*)>& body,
              int timeout_ms = 10000) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      tw_options options;
      tw_options_init(&options);
      options.rank = rank;
      options.size = kWorld;
      options.local_group = group;
      options.no_raw = 1;
      options.timeout_ms = timeout_ms;
      tw_comm* comm = nullptr;
      ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
      body(rank, comm);
      tw_comm_destroy(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<float> Gradient(int rank, int step, size_t numel) {
  std::vector<float> x(numel);
  for (size_t i = 0; i < numel; ++i) x[i] = static_cast<float>((i * 37 + step * 11 + rank) % 101);
  return x;
}

tw_bucket_info InfoOf(const char* name, size_t count) {
  tw_bucket_info info{};
  info.struct_size = sizeof(info);
  info.name = name;
  info.count = count;
  return info;
}

TEST(CBucket, GivesTheBitsOfACallByName) {
  constexpr size_t kNumel = 30000;
  RunRanks("bits", [](int rank, tw_comm* comm) {
    const std::vector<tw_segment> segments = {{"a", 0, 10000, 10000, 0, 0},
                                              {"b", 0, 20000, 20000, 0, 0}};
    tw_bucket_info info = InfoOf("handle", kNumel);
    info.segments = segments.data();
    info.num_segments = segments.size();
    tw_bucket* bucket = nullptr;
    ASSERT_EQ(tw_bucket_create(comm, &info, &bucket), TW_OK) << tw_last_error();
    std::vector<tw_segment> others = segments;
    others[0].name = "c";
    others[1].name = "d";
    for (int step = 0; step < 5; ++step) {
      std::vector<float> x = Gradient(rank, step, kNumel), y = x;
      uint32_t absent = 1;
      const size_t absents = step == 3 && rank == 0 ? 1 : 0;
      if (absents == 1) std::fill(x.begin() + 10000, x.end(), 0.0f);
      y = x;
      others[1].absent = static_cast<int>(absents);
      ASSERT_EQ(tw_bucket_start(bucket, x.data(), x.data(), nullptr, &absent, absents), TW_OK);
      tw_work* work = nullptr;
      ASSERT_EQ(tw_all_reduce_segments(y.data(), y.data(), kNumel, TW_F32, TW_MEAN, comm, nullptr,
                                       "call", 0, others.data(), others.size(), &work),
                TW_OK);
      ASSERT_EQ(tw_bucket_wait(bucket), TW_OK) << tw_last_error();
      ASSERT_EQ(tw_wait(work), TW_OK) << tw_last_error();
      EXPECT_TRUE(x == y) << step;
    }
    tw_bucket_destroy(bucket);
  });
}

TEST(CBucket, AUseMayHaveADivisorOfItsOwn) {
  constexpr size_t kNumel = 30000;
  RunRanks("divisor", [](int, tw_comm* comm) {
    const tw_bucket_info info = InfoOf("weighted", kNumel);
    tw_bucket* bucket = nullptr;
    ASSERT_EQ(tw_bucket_create(comm, &info, &bucket), TW_OK) << tw_last_error();
    for (const float divisor : {4.0f, 0.0f, 8.0f}) {
      std::vector<float> x(kNumel, 6.0f);
      ASSERT_EQ(tw_bucket_start_divided(bucket, x.data(), x.data(), nullptr, nullptr, 0, divisor),
                TW_OK);
      ASSERT_EQ(tw_bucket_wait(bucket), TW_OK) << tw_last_error();
      const float expected = 12.0f / (divisor == 0.0f ? kWorld : divisor);
      EXPECT_NEAR(x[0], expected, expected / 20);
      EXPECT_NEAR(x[kNumel - 1], expected, expected / 20);
    }
    std::vector<float> x(kNumel);
    EXPECT_EQ(tw_bucket_start_divided(bucket, x.data(), x.data(), nullptr, nullptr, 0, -2.0f),
              TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("divisor"), std::string::npos);
    tw_bucket_destroy(bucket);
  });
}

TEST(CBucket, AnAllToAllHandsEachRankItsPart) {
  constexpr size_t kPart = 5000;
  RunRanks("to all", [](int rank, tw_comm* comm) {
    tw_bucket_info info = InfoOf("parts", kPart * kWorld);
    info.collective = TW_ALL_TO_ALL;
    tw_bucket* bucket = nullptr;
    ASSERT_EQ(tw_bucket_create(comm, &info, &bucket), TW_OK) << tw_last_error();
    for (int step = 0; step < 3; ++step) {
      const std::vector<float> x = Gradient(rank, step, kPart * kWorld);
      std::vector<float> y(x.size()), expected;
      for (int r = 0; r < kWorld; ++r) {
        const std::vector<float> theirs = Gradient(r, step, kPart * kWorld);
        expected.insert(expected.end(), theirs.begin() + rank * kPart,
                        theirs.begin() + (rank + 1) * kPart);
      }
      ASSERT_EQ(tw_bucket_start(bucket, x.data(), y.data(), nullptr, nullptr, 0), TW_OK);
      ASSERT_EQ(tw_bucket_wait(bucket), TW_OK) << tw_last_error();
      EXPECT_TRUE(y == expected) << step;
    }
    tw_bucket_destroy(bucket);
  });
}

TEST(CBucket, WrongUseIsACodeAndAMessage) {
  RunRanks("wrong", [](int, tw_comm* comm) {
    tw_bucket* bucket = nullptr;
    tw_bucket_info info = InfoOf("x", 0);
    EXPECT_EQ(tw_bucket_create(comm, &info, &bucket), TW_INVALID_ARGUMENT);
    info.count = 100;
    info.collective = static_cast<tw_collective>(7);
    EXPECT_EQ(tw_bucket_create(comm, &info, &bucket), TW_INVALID_ARGUMENT);
    info.collective = TW_ALL_REDUCE;
    info.struct_size = 8;
    EXPECT_EQ(tw_bucket_create(comm, &info, &bucket), TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("8 bytes"), std::string::npos);
    info.struct_size = sizeof(info);
    ASSERT_EQ(tw_bucket_create(comm, &info, &bucket), TW_OK);
    EXPECT_EQ(tw_bucket_wait(bucket), TW_INVALID_ARGUMENT);
    std::vector<float> x(100);
    EXPECT_EQ(tw_bucket_start(bucket, x.data(), nullptr, nullptr, nullptr, 0), TW_INVALID_ARGUMENT);
    ASSERT_EQ(tw_bucket_start(bucket, x.data(), x.data(), nullptr, nullptr, 0), TW_OK);
    EXPECT_EQ(tw_bucket_start(bucket, x.data(), x.data(), nullptr, nullptr, 0),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_bucket_wait(bucket), TW_OK) << tw_last_error();
    tw_bucket_destroy(bucket);
  });
}

TEST(CBucket, TheHalvesMakeTheWhole) {
  constexpr size_t kPart = 5000;
  RunRanks("halves", [](int rank, tw_comm* comm) {
    const std::vector<float> x = Gradient(rank, 0, kWorld * kPart);
    std::vector<float> part(kPart), whole(kWorld * kPart), expected(kWorld * kPart);
    ASSERT_EQ(tw_reduce_scatter(x.data(), part.data(), kPart, TW_F32, TW_SUM, comm, nullptr), TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_all_gather(part.data(), whole.data(), kPart, TW_F32, comm, nullptr), TW_OK)
        << tw_last_error();
    for (int r = 0; r < kWorld; ++r) {
      const std::vector<float> theirs = Gradient(r, 0, kWorld * kPart);
      for (size_t i = 0; i < theirs.size(); ++i) expected[i] += theirs[i];
    }
    // int4 encodes twice: a step is a seventh of the largest value, and at most half of it is lost.
    for (size_t i = 0; i < whole.size(); ++i)
      EXPECT_NEAR(whole[i], expected[i], 100 / 14.0 + 201 / 14.0);
  });
}

TEST(CBucket, TheEngineSaysWhoWaitsForWhom) {
  RunRanks("describe", [](int rank, tw_comm* comm) {
    std::vector<float> x(30000), gate(30000);
    tw_work* work = nullptr;
    if (rank == 0) {
      ASSERT_EQ(tw_all_reduce_async(x.data(), x.data(), x.size(), TW_F32, TW_MEAN, comm, nullptr,
                                    "late", 0, &work),
                TW_OK);
      size_t bytes = 0;
      ASSERT_EQ(tw_comm_describe(comm, nullptr, 0, &bytes), TW_OK);
      std::string text(bytes + 4096, '\0');
      ASSERT_EQ(tw_comm_describe(comm, text.data(), text.size(), &bytes), TW_OK);
      EXPECT_NE(text.find("'late' call 0 waits for rank 1 to submit it"), std::string::npos)
          << text;
      EXPECT_NE(text.find("submitted 'late' 30000 elements"), std::string::npos) << text;
      char few[8];
      ASSERT_EQ(tw_comm_describe(comm, few, sizeof(few), &bytes), TW_OK);
      EXPECT_EQ(std::string(few).size(), 7u);
    }
    // Rank 1 submits only after rank 0 has looked.
    ASSERT_EQ(tw_all_reduce(gate.data(), gate.data(), gate.size(), TW_F32, TW_SUM, comm, nullptr),
              TW_OK);
    if (rank == 1) {
      ASSERT_EQ(tw_all_reduce_async(x.data(), x.data(), x.size(), TW_F32, TW_MEAN, comm, nullptr,
                                    "late", 0, &work),
                TW_OK);
    }
    EXPECT_EQ(tw_wait(work), TW_OK) << tw_last_error();
  });
}

}  // namespace
