// Which predicted chunks may start, and that chunks that peers wait for always start in the end.
#include "schedule/order/start_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace thinwire {
namespace {

constexpr uint32_t kChunkKiB = 100;

// A rank's queue of predicted chunks, each the only one of its tensor, and the tensors that the
// rank has submitted. Chunks are numbered 0, 1, … in the predicted order.
class Rank {
 public:
  explicit Rank(int lanes, std::vector<double> hop_shares = {1.0})
      : queue_(0, OptionsOf(lanes), Matching::kByTag, std::move(hop_shares), book_, outbox_) {}
  Rank(int chunks, int lanes, uint32_t window_kib, std::vector<double> hop_shares = {1.0})
      : Rank(lanes, std::move(hop_shares)) {
    Predict(std::vector<uint32_t>(chunks, window_kib));
  }

  // Appends chunks with these windows. Returns how many may soon be under way together.
  int Predict(const std::vector<uint32_t>& windows_kib) {
    std::vector<PredictedChunk> chunks;
    for (const uint32_t window_kib : windows_kib) {
      chunks.push_back({.id = ReportOf(static_cast<int>(count_++)).id(), .window_kib = window_kib});
    }
    queue_.Append(chunks);
    const int at_once = outbox_.actions().front().at_once;
    outbox_.Clear();
    return at_once;
  }

  void Submit(int chunk, size_t kib = kChunkKiB) {
    Report report = ReportOf(chunk);
    report.numel = (kib << 10) / sizeof(float);
    report.chunks = 1;
    book_.Insert(0, report.id(), {.report = std::make_shared<const Report>(report)});
  }

  // Returns the chunks that start now.
  std::vector<int> Start() {
    queue_.Start(0.0);
    std::vector<int> starting;
    for (const Action& action : outbox_.actions()) {
      EXPECT_EQ(action.kind, Action::Kind::kStart) << action.reason;
      const auto chunk = static_cast<int>(action.start.position - 1);
      EXPECT_EQ(action.start.id, ReportOf(chunk).id());
      starting.push_back(chunk);
    }
    outbox_.Clear();
    return starting;
  }

  void EndHop(int chunk) { queue_.OnHopDone(ChunkAt(chunk)); }
  void Finish(int chunk) { queue_.OnDone(ChunkAt(chunk)); }

 private:
  static Options OptionsOf(int lanes) {
    Options options;
    options.predicted_lanes = lanes;
    options.chunk_bytes = size_t{kChunkKiB} << 10;
    return options;
  }
  static Report ReportOf(int chunk) {
    Report report;
    report.key = static_cast<uint64_t>(chunk) + 1;
    return report;
  }
  static StartChunk ChunkAt(int chunk) {
    return {.id = ReportOf(chunk).id(), .position = static_cast<uint64_t>(chunk) + 1};
  }

  uint64_t count_ = 0;  // predicted chunks so far
  TensorBook book_{0, 1};
  Outbox outbox_;
  StartQueue queue_;
};

using Chunks = std::vector<int>;

TEST(StartQueueTest, AsManyStartAsTheWindowHolds) {
  Rank rank(4, 4, 2 * kChunkKiB);
  for (int chunk = 0; chunk < 4; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{0, 1}));
  rank.Finish(1);
  EXPECT_EQ(rank.Start(), (Chunks{2}));
  EXPECT_EQ(rank.Start(), Chunks());
}

// A first hop takes three quarters of a chunk's bytes. The window has room for two first hops, or
// for one beside two or three second hops. Hops end in another order than their chunks start.
TEST(StartQueueTest, AChunkCountsWithTheHopThatItIsAt) {
  Rank rank(6, 8, 3 * kChunkKiB / 2, {0.75, 0.25});
  for (int chunk = 0; chunk < 6; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{0, 1}));
  rank.EndHop(1);
  EXPECT_EQ(rank.Start(), Chunks());
  rank.EndHop(0);
  EXPECT_EQ(rank.Start(), (Chunks{2}));
  rank.EndHop(1);  // its last hop
  EXPECT_EQ(rank.Start(), Chunks());
  rank.Finish(1);
  EXPECT_EQ(rank.Start(), Chunks());
  rank.Finish(0);
  EXPECT_EQ(rank.Start(), (Chunks{3})) << "what has ended counts no more, and only once";
  rank.EndHop(0);
  EXPECT_EQ(rank.Start(), Chunks());
}

// Some chunks have fewer hops than the order expects, or fail half-way; others have more hops. All
// overtake chunk 0, and one fits into the window only while no other is under way.
TEST(StartQueueTest, AChunkGivesItsBytesBackHoweverItEnds) {
  for (const int hops : {0, 1, 2, 5}) {
    Rank rank(40, 8, kChunkKiB, {0.75, 0.25});
    for (int chunk = 1; chunk < 40; ++chunk) {
      rank.Submit(chunk);
      ASSERT_EQ(rank.Start(), (Chunks{chunk})) << hops << " hops";
      if (chunk + 1 < 40) rank.EndHop(chunk + 1);  // not started yet
      for (int hop = 0; hop < hops; ++hop) rank.EndHop(chunk);
      rank.Finish(chunk);
      rank.EndHop(chunk);
      rank.Finish(chunk);
    }
  }
}

// The oldest unfinished chunk starts however many bytes others have on their later hops.
TEST(StartQueueTest, TheOldestStartsBesideHopsThatFillTheWindow) {
  Rank rank(5, 8, kChunkKiB, {0.1, 0.9});
  for (int chunk = 1; chunk < 5; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{1, 2, 3, 4}));
  for (int chunk = 1; chunk < 5; ++chunk) rank.EndHop(chunk);
  rank.Submit(0);
  EXPECT_EQ(rank.Start(), (Chunks{0}));
}

TEST(StartQueueTest, AHopInsideANodeCountsAsTheNextOneOutside) {
  Rank rank(4, 8, 2 * kChunkKiB, {0.0, 1.0, 0.0});
  for (int chunk = 0; chunk < 4; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{0, 1}));
  rank.EndHop(0);
  EXPECT_EQ(rank.Start(), Chunks());
  rank.EndHop(0);
  EXPECT_EQ(rank.Start(), (Chunks{2})) << "the last hop leaves the link alone";
}

TEST(StartQueueTest, AChunkAboveTheWindowStartsAlone) {
  Rank rank(3, 4, 50);
  rank.Submit(1);
  rank.Submit(2, 10);
  EXPECT_EQ(rank.Start(), (Chunks{1})) << "in the predicted order";
  EXPECT_EQ(rank.Start(), Chunks());
}

TEST(StartQueueTest, WhatIsNotReadyHoldsNobodyUp) {
  Rank rank(3, 4, kChunkKiB);
  rank.Submit(2);
  EXPECT_EQ(rank.Start(), (Chunks{2}));
  rank.Submit(1);
  EXPECT_EQ(rank.Start(), Chunks());
  rank.Submit(0);
  EXPECT_EQ(rank.Start(), (Chunks{0})) << "the oldest, whatever the window";
  rank.Finish(2);
  EXPECT_EQ(rank.Start(), Chunks());
  rank.Finish(0);
  EXPECT_EQ(rank.Start(), (Chunks{1}));
}

TEST(StartQueueTest, OvertakingFillsHalfOfTheWindow) {
  Rank rank(6, 8, 4 * kChunkKiB);
  for (int chunk = 1; chunk < 6; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{1, 2}));
  rank.Submit(0);
  EXPECT_EQ(rank.Start(), (Chunks{0, 3})) << "nothing is overtaken any more";
}

TEST(StartQueueTest, EachChunkHasTheWindowOfItsPrediction) {
  Rank rank(4);
  EXPECT_EQ(rank.Predict({kChunkKiB, kChunkKiB, 2 * kChunkKiB}), 3);
  for (int chunk = 0; chunk < 3; ++chunk) rank.Submit(chunk);
  EXPECT_EQ(rank.Start(), (Chunks{0})) << "as the step before has it";
  rank.Finish(0);
  EXPECT_EQ(rank.Start(), (Chunks{1, 2}));
}

// A chunk that is ready but does not fit holds back all chunks behind it, however small.
TEST(StartQueueTest, ASmallChunkDoesNotOvertakeALargeOne) {
  Rank rank(3, 4, 3 * kChunkKiB / 2);
  rank.Submit(0);
  rank.Submit(1);
  rank.Submit(2, 10);
  EXPECT_EQ(rank.Start(), (Chunks{0}));
  rank.Finish(0);
  EXPECT_EQ(rank.Start(), (Chunks{1, 2}));
}

// A chunk finishes once all ranks have started it. With fewer lanes than chunks, and any window,
// everything finishes, whichever chunks are ready first on each rank.
TEST(StartQueueTest, RanksThatAreReadyInAnyOrderAllFinish) {
  constexpr int kRanks = 3, kChunks = 24, kLanes = 4;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    std::deque<Rank> ranks;  // elements never move
    std::vector<std::vector<int>> unready(kRanks, std::vector<int>(kChunks));
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back(kChunks, kLanes, static_cast<uint32_t>(kChunkKiB * (seed % 4)),
                         seed % 8 < 4 ? std::vector<double>{1.0} : std::vector<double>{0.9, 0.1});
      std::iota(unready[r].begin(), unready[r].end(), 0);
      std::shuffle(unready[r].begin(), unready[r].end(), random);
    }
    std::vector<int> starts(kChunks);
    int finished = 0;
    for (int event = 0; event < kRanks * kChunks; ++event) {
      ranks[event % kRanks].Submit(unready[event % kRanks].back());
      unready[event % kRanks].pop_back();
      for (bool moved = true; moved;) {
        moved = false;
        for (Rank& rank : ranks) {
          for (const int chunk : rank.Start()) {
            moved = true;
            if (++starts[chunk] < kRanks) continue;
            ++finished;
            for (Rank& each : ranks) {
              for (auto hop = random() % 4; hop > 0; --hop) each.EndHop(chunk);
              each.Finish(chunk);
            }
          }
        }
      }
    }
    ASSERT_EQ(finished, kChunks) << "seed " << seed;
  }
}

}  // namespace
}  // namespace thinwire
