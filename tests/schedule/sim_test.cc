// The simulator of steps: its bound is a bound, its clock adds up, and no schedule stalls.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "schedule/order/prediction.h"
#include "schedule/sim/jackson.h"
#include "schedule/sim/simulator.h"
#include "tests/effort.h"

namespace thinwire::sim {
namespace {

// The earliest end on one machine without preemption, found by trying all orders.
double BestOrder(const std::vector<Job>& jobs) {
  std::vector<size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  double best = 1e9;
  do {
    double now = 0, end = 0;
    for (const size_t j : order) {
      now = std::max(now, jobs[j].release) + jobs[j].length;
      end = std::max(end, now + jobs[j].tail);
    }
    best = std::min(best, end);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

TEST(Jackson, PreemptsForTheLongerTail) {
  // The long job is interrupted at time 1 for the job with the tail of 5, which ends at 2 + 5.
  EXPECT_DOUBLE_EQ(JacksonBound({{0, 4, 0}, {1, 1, 5}}), 7.0);
  EXPECT_DOUBLE_EQ(JacksonBound({{2, 3, 1}}), 6.0);
  EXPECT_DOUBLE_EQ(JacksonBound({}), 0.0);
}

TEST(Jackson, NoOrderIsBetter) {
  std::mt19937_64 random(3);
  const auto draw = [&] { return static_cast<double>(random() % 20); };
  for (int round = 0; round < 300; ++round) {
    std::vector<Job> jobs(1 + random() % 6);
    for (Job& job : jobs) job = {draw(), draw(), draw()};
    const double bound = JacksonBound(jobs);
    EXPECT_LE(bound, BestOrder(jobs) + 1e-9) << "round " << round;
    for (const Job& job : jobs) EXPECT_GE(bound, job.release + job.length + job.tail - 1e-9);
  }
}

TEST(PredictOrder, HasEveryChunkOnceAndPrefersThePolicy) {
  // Tensor 0 is ready first and long; tensor 1 becomes ready while it is on its way.
  const std::vector<ExpectedTensor> tensors = {{0.0, 4.0, 9, 4}, {1.5, 1.0, 1, 1}};
  using Chunks = std::vector<ChunkOfStep>;
  const ExpectedLink link{0.0, {1.0}};
  EXPECT_EQ(PredictOrder(tensors, Policy::kP3, link, 0.0),
            (Chunks{{0, 0}, {0, 1}, {1, 0}, {0, 2}, {0, 3}}));
  const Chunks in_turn = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 0}};
  EXPECT_EQ(PredictOrder(tensors, Policy::kFifo, link, 0.0), in_turn);
  EXPECT_EQ(PredictOrder(tensors, Policy::kWfbp, link, 0.0), in_turn);
}

Setting Small(size_t units, size_t numel) {
  Setting setting;
  for (size_t u = 0; u < units; ++u) setting.profile.units.push_back({numel, 1e-3, 2e-3});
  setting.engine.codecs = {CodecPair{}};
  setting.engine.policy = Policy::kP3;
  setting.engine.chunk_bytes = 1 << 16;
  setting.engine.min_bytes = 0;
  setting.bytes_per_s = 1e9;
  return setting;
}

TEST(Simulator, OneRankOnlyComputes) {
  Setting setting = Small(5, 100000);
  setting.ranks = 1;
  const Outcome outcome = Simulate(setting);
  ASSERT_TRUE(outcome.finished);
  for (const double step : outcome.step_s) EXPECT_NEAR(step, 5 * 3e-3, 1e-9);
}

TEST(Simulator, ASlowLinkTakesItsBytes) {
  Setting setting = Small(5, 1 << 20);
  setting.bytes_per_s = 1e7;
  setting.barrier = true;
  const Outcome outcome = Simulate(setting);
  ASSERT_TRUE(outcome.finished);
  // fp32 on both hops of two ranks: each rank sends its bytes once in total. The first gradient
  // comes after 2 ms, and the forward pass after the last byte takes 5 ms.
  EXPECT_NEAR(outcome.mean_s(), 5 * 4.0 * (1 << 20) / 1e7 + 7e-3, 1e-3);
}

// 16 chunks of 2 (n - 1) messages each if flat, or 2 (r + c - 2) in a grid, and rank 0's frames.
TEST(Simulator, MessagesTakeTheirTime) {
  Setting setting = Small(1, 1 << 18);
  setting.profile.units[0].forward_s = setting.profile.units[0].backward_s = 0.0;
  setting.ranks = 16;
  setting.bytes_per_s = 1e12;
  setting.message_s = 1e-4;
  setting.barrier = true;
  for (const auto& [topology, peers] : {std::pair(Topology::kFlat, 15), {Topology::kGrid, 6}}) {
    setting.engine.topology = topology;
    setting.cores = 0;
    const Outcome alone = Simulate(setting);
    ASSERT_TRUE(alone.finished);
    const double messages_s = 16 * 2 * peers * 1e-4;
    const double frames_s = alone.control_frames * 1e-4 / 2;
    EXPECT_GE(alone.mean_s(), messages_s);
    EXPECT_LT(alone.mean_s(), 1.1 * (messages_s + frames_s) + 1e-3);
    setting.cores = 4;
    const double shared = Simulate(setting).mean_s();
    EXPECT_GE(shared, 16 / 4 * messages_s) << "four ranks to each core";
    EXPECT_LT(shared, 1.1 * (16 / 4 * messages_s + 2 * frames_s / 4) + 4e-3);
  }
}

// By nodes a chunk's bytes between nodes are the flat bytes divided by the ranks of a node.
TEST(Simulator, NodesHaveLinksOfTheirOwn) {
  Setting setting = Small(1, 1 << 20);
  setting.profile.units[0].forward_s = setting.profile.units[0].backward_s = 0.0;
  setting.ranks = 8;
  setting.barrier = true;
  setting.bytes_per_s = 1e8;
  setting.inside_bytes_per_s = 1e12;
  setting.engine.local_size = 4;
  setting.engine.topology = Topology::kFlat;
  const double flat_s = Simulate(setting).mean_s();
  setting.engine.topology = Topology::kHierarchical;
  EXPECT_NEAR(flat_s / Simulate(setting).mean_s(), 4.0, 0.4);
  setting.inside_bytes_per_s = 1e7;
  EXPECT_GT(Simulate(setting).mean_s(), flat_s) << "a slow link inside";
}

// 100 ranks form ten groups of ten: for a tensor rank 0 exchanges frames with 9 ranks and 9 heads.
TEST(Simulator, HeadsOfGroupsSpareRankZero) {
  Setting setting = Small(4, 1 << 14);
  setting.ranks = 100;
  const double grouped = Simulate(setting).control_frames;
  setting.engine.control_tree_from = 101;
  const double flat = Simulate(setting).control_frames;
  EXPECT_LT(grouped * 5, flat);
}

TEST(Simulator, P3HidesWhatABarrierShows) {
  Setting setting = Small(8, 1 << 18);
  setting.bytes_per_s = 4.0 * (1 << 18) / 2.5e-3;  // about as long as the computation
  const Outcome p3 = Simulate(setting);
  setting.barrier = true;
  setting.engine.policy = Policy::kFifo;
  const Outcome fifo = Simulate(setting);
  EXPECT_LT(p3.mean_s() * 1.1, fifo.mean_s());
  EXPECT_LT(p3.ratio(), 1.1);
}

// 34 layers whose gradients take twice as long at 1 Gb/s as their computation. The first layers'
// hops are on their way while the next ones' are sent, and an urgent chunk waits only for those.
TEST(Simulator, APredictedOrderKeepsAFarLinkBusy) {
  Setting setting = Small(34, 750000);
  for (Unit& unit : setting.profile.units) unit = {750000, 5e-4, 1e-3};
  setting.engine.codecs = {*CodecPair::Parse("int4")};
  setting.engine.chunk_bytes = Options().chunk_bytes;
  setting.order = Order::kPredicted;
  setting.bytes_per_s = 125e6;
  setting.latency_s = 15e-3;
  setting.warmup = 10;
  setting.steps = 14;
  const Outcome outcome = Simulate(setting);
  ASSERT_TRUE(outcome.finished);
  EXPECT_LT(outcome.ratio(), 1.08);
}

TEST(Simulator, NoRandomScheduleStandsStillOrBeatsTheBound) {
  std::mt19937_64 random(11);
  for (int round = 0; round < Rounds(100000); ++round) {
    Setting setting = Small(1 + random() % 4, 0);
    for (Unit& unit : setting.profile.units) unit.numel = 1000 + random() % 60000;
    setting.ranks = 2 + static_cast<int>(random() % 3);
    setting.engine.policy = static_cast<Policy>(random() % 3);
    setting.engine.lanes = 1 + static_cast<int>(random() % 3);
    setting.engine.predicted_lanes = 1 + static_cast<int>(random() % 6);
    setting.hop_latencies = 1 + static_cast<int>(random() % 2);
    setting.barrier = random() % 2 == 0;
    setting.order = random() % 2 == 0 ? Order::kAnnounced : Order::kPredicted;
    setting.bytes_per_s = std::pow(10.0, 6.5 + static_cast<double>(random() % 30) / 10);
    setting.latency_s = std::pow(10.0, -5.0 + static_cast<double>(random() % 35) / 10);
    setting.jitter = static_cast<double>(random() % 5) / 10;
    setting.straggling = static_cast<double>(random() % 3) / 2;
    setting.seed = random();
    setting.steps = 4;
    const Outcome outcome = Simulate(setting);
    ASSERT_TRUE(outcome.finished) << "round " << round;
    ASSERT_GE(outcome.ratio(), 1.0 - 1e-9) << "round " << round;
  }
}

}  // namespace
}  // namespace thinwire::sim
