// The simulator of a store: the time of its links, orders and modes, compared with closed forms.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "schedule/sim/store.h"
#include "schedule/store/layout.h"

namespace thinwire::sim {
namespace {

constexpr size_t kHead = 32;  // bytes; frames.h
constexpr double kRate = 25e6, kLatency = 1e-3;

CodecPair Codec(const char* text) { return *CodecPair::Parse(text); }

// A setting without computation.
StoreSetting Exchange(std::vector<size_t> units, int workers, int servers) {
  StoreSetting setting;
  for (const size_t numel : units) setting.profile.units.push_back({.numel = numel});
  setting.workers = workers;
  setting.servers = servers;
  setting.codec = Codec("fp32");
  setting.bytes_per_s = kRate;
  setting.latency_s = kLatency;
  return setting;
}

double StepOf(const StoreSetting& setting) {
  const StoreOutcome outcome = SimulateStore(setting);
  EXPECT_TRUE(outcome.finished);
  if (setting.mode.kind == StoreMode::Kind::kSync) {
    EXPECT_LE(outcome.bound_s, outcome.step_s * (1 + 1e-9));
    EXPECT_GT(outcome.bound_s, 0);
  }
  return outcome.step_s;
}

// Returns the seconds of one message of a slice with `numel` elements in fp32.
double MessageOf(size_t numel) {
  return static_cast<double>(kHead + EncodedBytes(Codec("fp32").up, numel)) / kRate;
}

TEST(StoreSimulator, AMessageTakesItsBytesAndTheLatency) {
  EXPECT_NEAR(StepOf(Exchange({4096}, 1, 1)), 2 * (MessageOf(4096) + kLatency), 1e-9);
  StoreSetting apart = Exchange({4096}, 1, 1);  // the pull is a separate message
  apart.order = StoreOrder::kMxnet;
  EXPECT_NEAR(StepOf(apart), 2 * (MessageOf(4096) + kLatency) + kHead / kRate, 1e-9);
}

TEST(StoreSimulator, WorkersShareTheRateOfAServer) {
  const double message_s = MessageOf(4096);
  for (const int workers : {2, 7}) {
    StoreSetting setting = Exchange({4096}, workers, 1);
    setting.warmup = 0;
    setting.steps = 1;  // all workers begin together
    EXPECT_NEAR(StepOf(setting), 2 * (workers * message_s + kLatency), 1e-9);
    // In later steps each worker begins when it has its answer, while the others wait for theirs:
    // only the way up is shared by all at once.
    setting.steps = 9;
    setting.warmup = 1;
    EXPECT_NEAR(StepOf(setting), (workers + 1) * message_s + 2 * kLatency, 1e-9);
  }
  // Two servers have one key each, so a server's link carries as much as a worker's.
  StoreSetting setting = Exchange({4096, 4096}, 2, 2);
  setting.warmup = 0;
  setting.steps = 1;
  EXPECT_NEAR(StepOf(setting), 2 * (3 * message_s + kLatency), message_s);
  // A server as fast as its workers together takes their messages at the pace of one worker; its
  // answers leave one after another.
  setting = Exchange({4096}, 4, 1);
  setting.server_bytes_per_s = 4 * kRate;
  setting.warmup = 0;
  setting.steps = 1;
  EXPECT_NEAR(StepOf(setting), 2 * (message_s + kLatency) + 3 * message_s / 4, 1e-9);
}

// Both directions are busy at once: all slices go up, and then the last one comes down.
TEST(StoreSimulator, SlicesComeBackWhileOthersGo) {
  constexpr size_t kSlices = 64;
  StoreSetting setting = Exchange({kSlices * 4096}, 2, 1);
  setting.slice_elements = 4096;
  const double ideal = (kSlices + 1) * 2 * MessageOf(4096) + 2 * kLatency;
  EXPECT_GE(StepOf(setting), ideal - 1e-9);
  EXPECT_LE(StepOf(setting), 1.05 * ideal);
  setting.order = StoreOrder::kMxnet;  // the key is one slice
  const double whole = 3 * MessageOf(kSlices * 4096) + 2 * kLatency;
  EXPECT_NEAR(StepOf(setting), whole, 0.001 * whole);
}

TEST(StoreSimulator, ALinkThatIsFastEnoughCostsNothing) {
  StoreSetting setting = Exchange({4096, 4096, 4096}, 3, 2);
  for (Unit& unit : setting.profile.units) unit.forward_s = 1e-3, unit.backward_s = 2e-3;
  setting.profile.between_s = 5e-4;
  setting.bytes_per_s = 1e15;
  setting.latency_s = 0;
  EXPECT_NEAR(StepOf(setting), 9.5e-3, 1e-9);
  setting.slow = 3;  // all wait for the last worker
  EXPECT_NEAR(StepOf(setting), 3 * 9.5e-3, 1e-9);
}

// The first layer is small and the others are large. In fifo its values come after all others, so
// the forward pass begins once the link has carried everything since the first gradient. Under P3
// they come at once, and only the last layer's forward pass is left when the link has carried
// everything. In addition a slice waits for windows of other slices: a few hundredths here.
TEST(StoreSimulator, P3HidesTheForwardPassOfTheEarlyLayers) {
  StoreSetting setting = Exchange({4096, 4 << 20, 4 << 20}, 2, 2);
  setting.codec = Codec("int4");
  setting.slice_elements = 16 << 10;
  double bytes = 0;
  for (const Unit& unit : setting.profile.units) {
    bytes += static_cast<double>(EncodedBytes(setting.codec.up, unit.numel));
  }
  const double link_s = bytes / kRate;
  constexpr double kForward[] = {0.3, 0.02, 0.02};
  for (size_t u = 0; u < 3; ++u) {
    setting.profile.units[u].forward_s = kForward[u] * link_s;
    setting.profile.units[u].backward_s = 2 * kForward[u] * link_s;
  }
  setting.steps = 12;
  setting.order = StoreOrder::kFifo;
  const double fifo = StepOf(setting) / link_s;
  setting.order = StoreOrder::kP3;
  const double p3 = StepOf(setting) / link_s;
  const double bound = SimulateStore(setting).bound_s / link_s;
  EXPECT_GE(fifo, 0.04 + 1 + 0.34);
  EXPECT_LE(fifo, 1.05 * (0.04 + 1 + 0.34));
  EXPECT_GE(p3, 0.04 + 1 + 0.02);
  EXPECT_LE(p3, 1.12 * (0.04 + 1 + 0.02));
  EXPECT_NEAR(bound, 0.04 + 1 + 0.02, 0.02);
  setting.order = StoreOrder::kMxnet;  // a direction idles while a key goes the other way
  EXPECT_GT(StepOf(setting) / link_s, 1.3 * fifo);
}

TEST(StoreSimulator, NoOrderIsBetterThanTheBound) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 60; ++round) {
    StoreSetting setting =
        Exchange({}, 1 + static_cast<int>(random() % 4), 1 + static_cast<int>(random() % 3));
    for (size_t units = 1 + random() % 6; units > 0; --units) {
      setting.profile.units.push_back({1 + random() % 300000,
                                       1e-4 * static_cast<double>(random() % 100),
                                       1e-4 * static_cast<double>(random() % 100)});
    }
    setting.codec = Codec(random() % 2 == 0 ? "int4" : "int8:down=fp32");
    setting.server_bytes_per_s = kRate * static_cast<double>(1 + random() % 4);
    setting.slow = random() % 2 == 0 ? 1 : 2;
    setting.spike_chance = 0.2;
    setting.spike = 3;
    setting.seed = random();
    for (const StoreOrder order : {StoreOrder::kFifo, StoreOrder::kP3, StoreOrder::kMxnet}) {
      setting.order = order;
      SCOPED_TRACE(round);
      StepOf(setting);
    }
  }
}

// Four workers and a key that takes no time: only the ledger makes them wait. All of a step is
// computed between two exchanges.
StoreSetting Stragglers(const char* mode, int steps) {
  StoreSetting setting = Exchange({16}, 4, 1);
  setting.profile.units[0].backward_s = 0.04;
  setting.bytes_per_s = 1e12;
  setting.latency_s = 0;
  setting.mode = *StoreMode::Parse(mode);
  setting.steps = steps;
  return setting;
}

TEST(StoreSimulator, OneOfFourAtHalfSpeed) {
  const auto step = [](const char* mode) {
    StoreSetting setting = Stragglers(mode, 402);
    setting.slow = 2;
    return StepOf(setting);
  };
  // 2 + 2 + 2 + 1 updates in the time of a sync step, which has 4.
  const double sync = step("sync");
  EXPECT_NEAR(sync, 0.08, 1e-6);
  EXPECT_NEAR(sync / step("async"), 1.75, 0.01);
  EXPECT_NEAR(sync / step("ssp:staleness=2"), 1.75, 0.01);
  // During the slow worker's step four updates of the others may be applied, and then its own.
  EXPECT_NEAR(sync / step("ssp:staleness=1"), 1.25, 0.01);
}

TEST(StoreSimulator, OneStepInTenTakesFourTimesAsLong) {
  const auto step = [](const char* mode) {
    StoreSetting setting = Stragglers(mode, 4002);
    setting.spike_chance = 0.1;
    setting.spike = 4;
    return StepOf(setting);
  };
  // The mean of the slowest of four, divided by the mean of one: (0.9^4 + 4 (1 - 0.9^4)) / 1.3.
  const double sync = step("sync");
  EXPECT_NEAR(sync / step("async"), 2.0317 / 1.3, 0.03);
  EXPECT_NEAR(sync / step("ssp:staleness=2"), 1.48, 0.03);
}

TEST(StoreSimulator, IsTheSameEachTime) {
  StoreSetting setting = Stragglers("ssp:staleness=1", 50);
  setting.spike_chance = 0.3;
  setting.spike = 5;
  const double step = StepOf(setting);
  EXPECT_EQ(StepOf(setting), step);
  setting.seed = 2;
  EXPECT_NE(StepOf(setting), step);
}

}  // namespace
}  // namespace thinwire::sim
