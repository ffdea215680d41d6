// Exchanges spread over several planes, and a store that is guarded while these connect.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "schedule/join/guards.h"
#include "transport/combined/combined.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::seconds;

constexpr int kPlanes = 3, kExchanges = 60;
constexpr size_t kBytes = 100;

// Two ranks, with direct access to their planes.
class SpreadTest : public testing::Test {
 protected:
  SpreadTest() : control_(MakeInProcessTransports(2)), planes_(2) {
    std::vector<std::vector<Transport>> others(2);
    std::vector<std::unique_ptr<DataPlane>> first(2);
    for (int i = 0; i < kPlanes; ++i) {
      std::vector<Transport> transports = i == 0 ? std::move(control_) : MakeInProcessTransports(2);
      for (int r = 0; r < 2; ++r) {
        planes_[r].push_back(transports[r].data.get());
        if (i == 0) {
          first[r] = std::move(transports[r].data);
        } else {
          others[r].push_back(std::move(transports[r]));
        }
      }
      if (i == 0) control_ = std::move(transports);
    }
    for (int r = 0; r < 2; ++r) {
      spread_.push_back(std::make_unique<Spread>(std::move(first[r]), std::move(others[r])));
    }
  }

  // Runs the exchange with this tag on both ranks.
  absl::Status Exchange(uint64_t tag) {
    std::vector<std::unique_ptr<thinwire::Exchange>> exchanges;
    std::vector<uint8_t> out(kBytes, static_cast<uint8_t>(tag));
    std::vector<std::vector<uint8_t>> in(2, std::vector<uint8_t>(kBytes));
    for (int r = 0; r < 2; ++r) {
      std::vector<Bytes> send(2, out);
      std::vector<MutableBytes> recv(2, MutableBytes(in[r]));
      exchanges.push_back(spread_[r]->Start(tag, send, recv));
    }
    absl::Status status;
    for (const auto& exchange : exchanges)
      status.Update(exchange->Wait(Clock::now() + seconds(20)));
    if (!status.ok()) return status;
    EXPECT_EQ(in, std::vector(2, out));
    return status;
  }

  std::vector<Transport> control_;
  std::vector<std::vector<DataPlane*>> planes_;  // by rank
  std::vector<std::unique_ptr<Spread>> spread_;
};

TEST_F(SpreadTest, EveryPlaneHasItsPartAndAllOfItIsCounted) {
  for (int i = 0; i < kExchanges; ++i) {
    ASSERT_TRUE(Exchange(0x9e3779b97f4a7c15ULL * (i + 1)).ok());
  }
  for (const DataPlane* plane : planes_[0]) {
    EXPECT_GE(plane->bytes_sent(), kExchanges * kBytes / kPlanes / 3);
  }
  EXPECT_EQ(spread_[0]->bytes_sent(), kExchanges * kBytes);
}

TEST_F(SpreadTest, AFailureOfOnePlaneIsThatOfAllAtOnce) {
  planes_[0][2]->Abort(absl::UnavailableError("its link is cut"));
  EXPECT_EQ(spread_[0]->status().message(), "its link is cut");
  for (const DataPlane* plane : planes_[0]) EXPECT_FALSE(plane->status().ok());
  EXPECT_EQ(Exchange(0).message(), "its link is cut") << "which goes by another plane";
  EXPECT_EQ(planes_[0][0]->status().message(), "its link is cut");
}

TEST_F(SpreadTest, AnAbortReachesEveryPlane) {
  spread_[0]->Abort(absl::CancelledError("enough"));
  for (const DataPlane* plane : planes_[0]) EXPECT_EQ(plane->status().message(), "enough");
}

TEST(GuardedStore, AWaitEndsWithTheGroupsFailure) {
  std::vector<Transport> group = MakeInProcessTransports(2);
  GuardedStore store(MakeInProcessStore(), *group[0].control);
  std::thread killer([&] { group[0].control->Abort(absl::UnavailableError("rank 1 is gone")); });
  const Deadline deadline = Clock::now() + seconds(60);
  EXPECT_EQ(store.Get("nobody sets this", deadline).status().message(), "rank 1 is gone");
  EXPECT_LT(Clock::now(), deadline);
  killer.join();
}

TEST(GuardedStore, WhatIsThereComesAndADeadlineIsKept) {
  std::vector<Transport> group = MakeInProcessTransports(2);
  GuardedStore store(MakeInProcessStore(), *group[0].control);
  ASSERT_TRUE(store.Set("key", "value").ok());
  EXPECT_EQ(*store.Get("key", Clock::now() + seconds(20)), "value");
  const absl::Status late =
      store.Get("other", Clock::now() + std::chrono::milliseconds(120)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
}

}  // namespace
}  // namespace thinwire
