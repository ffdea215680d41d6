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
  window.SetLimit(200);
  for (uint64_t position = 0; position < 4; ++position) {
    window.Hold(position);
    window.Ready(position, 100);
  }
  EXPECT_TRUE(window.MayStart(0));
  EXPECT_FALSE(window.MayStart(1)) << "in the predicted order";
  window.Start(0);
  EXPECT_TRUE(window.MayStart(1));
  window.Start(1);
  EXPECT_FALSE(window.MayStart(2));
  window.Finish(1);
  EXPECT_TRUE(window.MayStart(2));
  EXPECT_FALSE(window.MayStart(3));
}

TEST(PredictedWindowTest, AChunkAboveTheLimitStartsAlone) {
  PredictedWindow window;
  window.SetLimit(50);
  for (uint64_t position = 0; position < 3; ++position) window.Hold(position);
  window.Ready(1, 100);
  window.Ready(2, 10);
  EXPECT_FALSE(window.MayStart(2)) << "in the predicted order";
  EXPECT_TRUE(window.MayStart(1));
  window.Start(1);
  EXPECT_FALSE(window.MayStart(2));
}

TEST(PredictedWindowTest, WhatIsNotReadyHoldsNobodyUp) {
  PredictedWindow window;
  window.SetLimit(100);
  for (uint64_t position = 0; position < 3; ++position) window.Hold(position);
  window.Ready(2, 100);
  EXPECT_TRUE(window.MayStart(2));
  window.Start(2);
  window.Ready(1, 100);
  EXPECT_FALSE(window.MayStart(1));
  window.Ready(0, 100);
  EXPECT_TRUE(window.MayStart(0)) << "the oldest, whatever the limit";
  window.Start(0);
  window.Finish(2);
  EXPECT_FALSE(window.MayStart(1));
  window.Finish(0);
  EXPECT_TRUE(window.MayStart(1));
}

// A rank with lanes, which takes chunks in the predicted order, and has them ready in its own.
class Rank {
 public:
  Rank(int chunks, int lanes, size_t limit, std::mt19937& random)
      : lanes_(lanes), ready_(chunks), started_(chunks), unready_(chunks) {
    window_.SetLimit(limit);
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
      window_.Hold(taken_);
      if (ready_[taken_]) window_.Ready(taken_, 100);
    }
    std::vector<int> starting;
    for (int chunk = 0; chunk < taken_; ++chunk) {
      if (!ready_[chunk] || started_[chunk] || !window_.MayStart(chunk)) continue;
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
