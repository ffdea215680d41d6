// Which predicted chunks may start, and that what peers wait for always does in the end.
#include "schedule/order/predicted_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace thinwire {
namespace {

TEST(PredictedWindowTest, AsManyStartAsTheLimitSays) {
  PredictedWindow window;
  for (uint64_t position = 0; position < 4; ++position) {
    window.Hold(position, 200);
    window.Ready(position, 100);
  }
  EXPECT_TRUE(window.MayStart(0, false));
  EXPECT_FALSE(window.MayStart(1, false)) << "in the predicted order";
  window.Start(0);
  EXPECT_TRUE(window.MayStart(1, false));
  window.Start(1);
  EXPECT_FALSE(window.MayStart(2, false));
  window.Finish(1);
  EXPECT_TRUE(window.MayStart(2, false));
  EXPECT_FALSE(window.MayStart(3, false));
}

TEST(PredictedWindowTest, AChunkAboveTheLimitStartsAlone) {
  PredictedWindow window;
  for (uint64_t position = 0; position < 3; ++position) window.Hold(position, 50);
  window.Ready(1, 100);
  window.Ready(2, 10);
  EXPECT_FALSE(window.MayStart(2, true)) << "in the predicted order";
  EXPECT_TRUE(window.MayStart(1, true));
  window.Start(1);
  EXPECT_FALSE(window.MayStart(2, true));
}

TEST(PredictedWindowTest, WhatIsNotReadyHoldsNobodyUp) {
  PredictedWindow window;
  for (uint64_t position = 0; position < 3; ++position) window.Hold(position, 100);
  window.Ready(2, 100);
  EXPECT_TRUE(window.MayStart(2, true));
  window.Start(2);
  window.Ready(1, 100);
  EXPECT_FALSE(window.MayStart(1, true));
  window.Ready(0, 100);
  EXPECT_TRUE(window.MayStart(0, false)) << "the oldest, whatever the limit";
  window.Start(0);
  window.Finish(2);
  EXPECT_FALSE(window.MayStart(1, false));
  window.Finish(0);
  EXPECT_TRUE(window.MayStart(1, false));
}

TEST(PredictedWindowTest, OvertakingFillsHalfOfIt) {
  PredictedWindow window;
  for (uint64_t position = 0; position < 6; ++position) window.Hold(position, 400);
  for (uint64_t position = 1; position < 6; ++position) window.Ready(position, 100);
  for (uint64_t position = 1; position < 3; ++position) {
    EXPECT_TRUE(window.MayStart(position, true));
    window.Start(position);
  }
  EXPECT_FALSE(window.MayStart(3, true));
  window.Ready(0, 100);
  window.Start(0);
  EXPECT_TRUE(window.MayStart(3, false)) << "nothing is overtaken any more";
  window.Start(3);
  EXPECT_FALSE(window.MayStart(4, false));
}

TEST(PredictedWindowTest, EachChunkHasItsPredictionsLimit) {
  PredictedWindow window;
  window.Hold(0, 100);
  window.Hold(1, 100);
  window.Hold(2, 200);
  for (uint64_t position = 0; position < 3; ++position) window.Ready(position, 100);
  window.Start(0);
  EXPECT_FALSE(window.MayStart(1, false)) << "as the step before has it";
  window.Finish(0);
  window.Start(1);
  EXPECT_TRUE(window.MayStart(2, false));
}

// The queue knows who overtakes whom.
TEST(PredictedQueueTest, WhatIsReadyBehindALateTensorFillsHalfTheWindow) {
  Report report;
  report.numel = 1024;  // 4 KiB
  report.chunks = 1;
  bool late_is_here = false;
  const auto submitted = [&](uint64_t id) -> const Report* {
    return id != 0 || late_is_here ? &report : nullptr;
  };
  PredictedQueue queue(8);
  for (uint64_t id = 0; id < 4; ++id) queue.Append({.id = id, .window_kib = 16});
  EXPECT_EQ(queue.AtOnce(4096), 4u);
  EXPECT_EQ(queue.Next(submitted)->chunk.id, 1u);
  EXPECT_EQ(queue.Next(submitted)->chunk.id, 2u);
  EXPECT_FALSE(queue.Next(submitted).has_value());
  late_is_here = true;
  EXPECT_EQ(queue.Next(submitted)->chunk.id, 0u);
  EXPECT_EQ(queue.Next(submitted)->chunk.id, 3u);
}

// A rank with lanes, which takes chunks in the predicted order, and has them ready in its own.
class Rank {
 public:
  Rank(int chunks, int lanes, size_t limit, std::mt19937& random)
      : limit_(limit), lanes_(lanes), ready_(chunks), started_(chunks), unready_(chunks) {
    std::iota(unready_.begin(), unready_.end(), 0);
    std::shuffle(unready_.begin(), unready_.end(), random);
  }

  void MakeOneReady() {
    const int chunk = unready_.back();
    unready_.pop_back();
    ready_[chunk] = true;
    if (chunk < taken_) window_.Ready(chunk, 100);
  }

  // The chunks that start now.
  std::vector<int> Start() {
    const int chunks = static_cast<int>(ready_.size());
    for (; lanes_ > 0 && taken_ < chunks; --lanes_, ++taken_) {
      window_.Hold(taken_, limit_);
      if (ready_[taken_]) window_.Ready(taken_, 100);
    }
    std::vector<int> starting;
    bool overtakes = false;
    for (int chunk = 0; chunk < taken_; ++chunk) {
      overtakes = overtakes || !ready_[chunk];
      if (!ready_[chunk] || started_[chunk] || !window_.MayStart(chunk, overtakes)) continue;
      window_.Start(chunk);
      started_[chunk] = true;
      starting.push_back(chunk);
    }
    return starting;
  }

  void Finish(int chunk) {
    window_.Finish(chunk);
    ++lanes_;
  }

 private:
  PredictedWindow window_;
  const size_t limit_;
  int lanes_, taken_ = 0;
  std::vector<bool> ready_, started_;
  std::vector<int> unready_;
};

// A chunk is finished when all ranks have started it. With fewer lanes than chunks, and limits from
// none, everything finishes, whatever is ready first on which rank.
TEST(PredictedWindowTest, RanksThatAreReadyInAnyOrderAllFinish) {
  constexpr int kRanks = 3, kChunks = 24, kLanes = 4;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    std::vector<Rank> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back(kChunks, kLanes, 100 * (seed % 4), random);
    }
    std::vector<int> starts(kChunks);
    int finished = 0;
    for (int event = 0; event < kRanks * kChunks; ++event) {
      ranks[event % kRanks].MakeOneReady();
      for (bool moved = true; moved;) {
        moved = false;
        for (Rank& rank : ranks) {
          for (const int chunk : rank.Start()) {
            moved = true;
            if (++starts[chunk] < kRanks) continue;
            ++finished;
            for (Rank& each : ranks) each.Finish(chunk);
          }
        }
      }
    }
    ASSERT_EQ(finished, kChunks) << "seed " << seed;
  }
}

}  // namespace
}  // namespace thinwire
