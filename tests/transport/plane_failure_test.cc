// One failure shared by all planes of a rank.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "transport/in_process/in_process.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

using std::chrono::seconds;

TEST(Failure, TheFirstReasonStaysAndAllListenersHearOfIt) {
  const auto failure = Failure::Make();
  int before = 0, after = 0, removed = 0;
  const Failure::Listener early = failure->Listen([&] { ++before; });
  {
    const Failure::Listener ended = failure->Listen([&] { ++removed; });
  }
  EXPECT_TRUE(failure->reason().ok());
  failure->Fail(absl::AbortedError("enough"));
  failure->Fail(absl::InternalError("too late"));
  const Failure::Listener late = failure->Listen([&] { ++after; });
  EXPECT_TRUE(failure->failed());
  EXPECT_EQ(failure->reason().message(), "enough");
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 1);
  EXPECT_EQ(removed, 0);
}

// A listener may query the failure, fail again, and end listeners: no lock is held during its call.
TEST(Failure, AListenerMayCallTheFailureAndEndItself) {
  const auto failure = Failure::Make();
  Failure::Listener own;
  std::string heard;
  own = failure->Listen([&] {
    heard = std::string(failure->reason().message());
    failure->Fail(absl::InternalError("again"));
    own.Reset();
  });
  failure->Fail(absl::AbortedError("enough"));
  EXPECT_EQ(heard, "enough");
}

// The caller that ends a listener frees what it uses.
TEST(Failure, TheEndOfAListenerWaitsForItsCall) {
  const auto failure = Failure::Make();
  absl::Notification called, go_on;
  std::atomic<bool> returned{false};
  auto listener = std::make_unique<Failure::Listener>(failure->Listen([&] {
    called.Notify();
    go_on.WaitForNotification();
    returned = true;
  }));
  std::thread fails([&] { failure->Fail(absl::AbortedError("enough")); });
  called.WaitForNotification();
  std::thread ends([&] {
    listener.reset();
    EXPECT_TRUE(returned);
  });
  go_on.Notify();
  ends.join();
  fails.join();
}

TEST(Failure, PassedOnBothWaysItFailsBothWhicheverFailsFirst) {
  for (const bool one_first : {true, false}) {
    const auto one = Failure::Make(), other = Failure::Make();
    {
      const Failure::Listener of_one = one->PassOn(other), of_other = other->PassOn(one);
      (one_first ? one : other)->Fail(absl::AbortedError("enough"));
    }
    EXPECT_EQ(one->reason().message(), "enough");
    EXPECT_EQ(other->reason().message(), "enough");
  }
}

// For example a data plane beside another backend's control plane.
TEST(Failure, PassedOnItEndsTheWaitsOfAnotherPlaneWhileThatIsAskedFor) {
  for (const bool asked_for : {true, false}) {
    std::vector<Transport> transports = MakeInProcessTransports(2),
                           others = MakeInProcessTransports(2);
    const std::vector<uint8_t> out(8);
    std::vector<uint8_t> in(8);
    const auto exchange =
        others[0].data->Start(1, std::vector<Bytes>(2, out), std::vector<MutableBytes>(2, in));
    Failure::Listener listener =
        transports[0].control->failure()->PassOn(others[0].data->failure());
    if (!asked_for) listener.Reset();
    transports[1].Reset();
    if (!asked_for) others[0].data->Abort(absl::AbortedError("not asked for"));
    const absl::Status status = exchange->Wait(Clock::now() + seconds(60));
    EXPECT_EQ(absl::IsUnavailable(status), asked_for) << status;
    EXPECT_EQ(status == transports[0].control->status(), asked_for);
  }
}

}  // namespace
}  // namespace thinwire
