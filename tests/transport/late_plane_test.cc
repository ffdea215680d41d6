// Properties of LatePlane beyond the contract of data planes, on which other tests rely.
#include "tests/transport/late_plane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <numeric>

namespace thinwire {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

Deadline Soon() { return Clock::now() + seconds(20); }

// A rank's exchanges of one byte with each peer, and the order in which they end.
class Events {
 public:
  Events(DataPlane& plane, const std::vector<uint64_t>& tags) : left_(tags.size()) {
    in_.resize(tags.size(), std::vector<uint8_t>(plane.size()));
    for (size_t i = 0; i < tags.size(); ++i) {
      const std::vector<Bytes> send(plane.size(), Bytes(&byte_, 1));
      std::vector<MutableBytes> recv;
      for (uint8_t& byte : in_[i]) recv.push_back(MutableBytes(&byte, 1));
      plane.Start(tags[i], send, recv)->OnDone([this, tag = tags[i]](absl::Status status) {
        const absl::MutexLock lock(&mu_);
        ended_.emplace_back(tag, std::move(status));
        --left_;
      });
    }
  }
  ~Events() { EXPECT_EQ(AllEnded().size(), in_.size()); }

  std::vector<std::pair<uint64_t, absl::Status>> AllEnded() {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](size_t* left) { return *left == 0; }, &left_));
    return ended_;
  }

  void AwaitLeft(size_t left) {
    const absl::MutexLock lock(&mu_);
    const auto enough = [this, left]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return left_ <= left; };
    mu_.Await(absl::Condition(&enough));
  }

 private:
  const uint8_t byte_ = 1;
  std::vector<std::vector<uint8_t>> in_;
  absl::Mutex mu_;
  size_t left_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<uint64_t, absl::Status>> ended_ ABSL_GUARDED_BY(mu_);
};

std::vector<uint64_t> Tags(int count) {
  std::vector<uint64_t> tags(count);
  std::iota(tags.begin(), tags.end(), 100);
  return tags;
}

std::vector<uint64_t> OrderOf(Events& events) {
  std::vector<uint64_t> order;
  for (const auto& [tag, status] : events.AllEnded()) {
    EXPECT_TRUE(status.ok()) << status;
    order.push_back(tag);
  }
  return order;
}

class LatePlaneTest : public testing::TestWithParam<Matching> {};
INSTANTIATE_TEST_SUITE_P(All, LatePlaneTest, testing::Values(Matching::kByTag, Matching::kByOrder));

TEST_P(LatePlaneTest, EndsExchangesOutOfOrderAndTheSameForASeed) {
  // The delays differ enough to determine the order in which the exchanges end.
  const auto planes =
      MakeLatePlanes(2, {GetParam(), LateOptions::OutOfOrder(7, std::chrono::milliseconds(200))});
  Events first(*planes[0], Tags(8)), second(*planes[1], Tags(8));
  const std::vector<uint64_t> order = OrderOf(first);
  EXPECT_NE(order, Tags(8));
  EXPECT_TRUE(std::is_permutation(order.begin(), order.end(), Tags(8).begin()));
  OrderOf(second);
}

TEST_P(LatePlaneTest, InOrderAnExchangeEndsAfterThoseBeforeIt) {
  const auto planes = MakeLatePlanes(
      3, {GetParam(), LateOptions::OutOfOrder(7, microseconds(2000)), /*in_order=*/true});
  Events events0(*planes[0], Tags(30)), events1(*planes[1], Tags(30)),
      events2(*planes[2], Tags(30));
  for (Events* events : {&events0, &events1, &events2}) EXPECT_EQ(OrderOf(*events), Tags(30));
}

TEST_P(LatePlaneTest, AnExchangeThatNeverEndsEndsByAbort) {
  const auto planes = MakeLatePlanes(2, {GetParam(), LateOptions::NeverFor({101})});
  Events first(*planes[0], Tags(4)), second(*planes[1], Tags(4));
  first.AwaitLeft(1);
  second.AwaitLeft(1);
  for (const auto& plane : planes) EXPECT_TRUE(plane->status().ok());
  for (const auto& plane : planes) plane->Abort(absl::AbortedError("enough"));
  for (Events* events : {&first, &second}) {
    const auto ended = events->AllEnded();
    EXPECT_EQ(ended.back().first, 101u);
    EXPECT_EQ(ended.back().second.message(), "enough");
  }
}

TEST_P(LatePlaneTest, EndsNothingBeforeAllPeersHaveStarted) {
  const auto planes = MakeLatePlanes(3, {GetParam()});
  std::atomic<bool> last_started = false, too_early = false;
  const std::vector<Bytes> send(3);
  uint8_t byte = 0, in = 0;
  const std::vector<Bytes> bytes(3, Bytes(&byte, 1));
  std::promise<void> ended;
  planes[0]
      ->Start(1, bytes, std::vector<MutableBytes>{{}, {}, {&in, 1}})
      ->OnDone([&](absl::Status status) {
        EXPECT_TRUE(status.ok()) << status;
        too_early = !last_started;
        ended.set_value();
      });
  const auto other = planes[1]->Start(1, bytes, std::vector<MutableBytes>(3));
  EXPECT_TRUE(other->Wait(Soon()).ok());  // it receives nothing
  last_started = true;
  const auto last = planes[2]->Start(1, bytes, std::vector<MutableBytes>(3));
  EXPECT_TRUE(last->Wait(Soon()).ok());
  ended.get_future().wait();
  EXPECT_FALSE(too_early);
}

// OnDone on an exchange that has ended calls `done` at once.
TEST_P(LatePlaneTest, OnDoneAfterTheEndIsCalledAtOnce) {
  const auto planes = MakeLatePlanes(2, {GetParam()});
  const auto mine = planes[0]->Start(1, std::vector<Bytes>(2), std::vector<MutableBytes>(2));
  const auto next = planes[0]->Start(2, std::vector<Bytes>(2), std::vector<MutableBytes>(2));
  EXPECT_TRUE(next->Wait(Soon()).ok());  // ends after the one before it
  int calls = 0;
  mine->OnDone([&calls](absl::Status status) { calls += status.ok() ? 1 : 100; });
  EXPECT_EQ(calls, 1);
}

TEST(LatePlaneByOrder, OtherOrdersFailAllRanksAndAreNamed) {
  const auto planes = MakeLatePlanes(2, {Matching::kByOrder});
  Events first(*planes[0], {100, 101, 102}), second(*planes[1], {100, 102, 101});
  for (const auto& plane : planes) {
    const absl::Status status = plane->status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    for (const char* part : {"exchange 1 ", "tag 102 on rank 1", "tag 101 on rank 0"}) {
      EXPECT_NE(status.message().find(part), absl::string_view::npos) << status;
    }
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(second.AllEnded().back().second));
}

TEST(LatePlaneByTag, OtherOrdersAreFine) {
  const auto planes = MakeLatePlanes(2, {Matching::kByTag});
  Events first(*planes[0], {100, 101, 102}), second(*planes[1], {102, 100, 101});
  EXPECT_EQ(OrderOf(first).size(), 3u);
  EXPECT_EQ(OrderOf(second).size(), 3u);
}

// Destroying a plane calls `done` of its pending exchanges, and its peers' errors name its rank.
TEST_P(LatePlaneTest, ADestroyedPlaneEndsItsExchanges) {
  auto planes = MakeLatePlanes(2, {GetParam(), LateOptions::NeverFor({100})});
  Events first(*planes[0], Tags(1)), second(*planes[1], Tags(1));
  planes[1].reset();
  EXPECT_TRUE(absl::IsCancelled(second.AllEnded()[0].second));
  const absl::Status status = first.AllEnded()[0].second;
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace thinwire
