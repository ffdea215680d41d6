// Devices as libraries other than ours see them: events that the host asks for without waiting, the
// thread's current device, identities. On CPU threads, which can be made to wait.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

std::shared_ptr<Device> HostDevice(int ordinal) {
  return MakeDevice(kernels::HostDeviceApi(), ordinal, "host:" + std::to_string(ordinal));
}

// Work of a stream that goes on until the end of the scope.
class Held {
 public:
  explicit Held(DeviceStream& stream) {
    kernels::QueueOnHostDevice(stream.handle(), [over = over_] { over->WaitForNotification(); });
  }
  ~Held() { over_->Notify(); }

 private:
  // Shared, since the stream may look at it once more when the scope has ended.
  const std::shared_ptr<absl::Notification> over_ = std::make_shared<absl::Notification>();
};

TEST(HostDevice, AnEventIsReachedWhenTheWorkBeforeItIsDone) {
  const auto device = HostDevice(0);
  const auto stream = *device->MakeStream();
  EXPECT_TRUE(stream->HasReached(nullptr));
  std::shared_ptr<DeviceEvent> event;
  {
    const Held held(*stream);
    event = stream->Record();
    EXPECT_FALSE(stream->HasReached(event));
  }
  EXPECT_TRUE(stream->Synchronize(InTime()).ok());
  EXPECT_TRUE(stream->HasReached(event));
}

// An event goes back to its pool when nobody needs it any more, before it is reached, and is then
// recorded on another stream. Who waits for the first point is not let go by the second.
TEST(HostDevice, AnEventMayBeRecordedAnewWhileStreamsWaitForIt) {
  const auto device = HostDevice(0);
  const auto slow = *device->MakeStream(), fast = *device->MakeStream();
  const auto waiting = *device->MakeStream();
  std::atomic<bool> over = false, early = false;
  {
    const Held held(*slow);
    waiting->WaitFor(slow->Record());
    kernels::QueueOnHostDevice(waiting->handle(), [&] { early = !over; });
    fast->WaitFor(fast->Record());  // the same event
    EXPECT_TRUE(fast->Synchronize(InTime()).ok());
    over = true;
  }
  EXPECT_TRUE(waiting->Synchronize(InTime()).ok());
  EXPECT_FALSE(early);
}

TEST(HostDevice, RunOnCallsAtOnceOrSaysWhyNot) {
  bool called = false;
  EXPECT_TRUE(HostDevice(3)->RunOn([&] { called = true; }).ok());
  EXPECT_TRUE(called);
  const absl::Status none =
      HostDevice(kernels::kHostDevices)->RunOn([] { FAIL() << "there is no such device"; });
  EXPECT_TRUE(absl::IsInternal(none)) << none;
}

TEST(HostDevice, DevicesHaveIdentitiesAndMemoryOfTheirOwn) {
  const auto first = HostDevice(0), second = HostDevice(1);
  EXPECT_EQ(*first->identity(), *HostDevice(0)->identity());
  EXPECT_NE(*first->identity(), *second->identity());
  const DeviceMemory memory = *second->Allocate(10);
  EXPECT_TRUE(second->Holds(memory.get() + 9));
  EXPECT_FALSE(first->Holds(memory.get()));
}

// Freeing waits for work of that device, but not for another rank's.
TEST(HostDevice, FreeingWaitsForTheDevicesOwnWorkOnly) {
  const auto first = HostDevice(0), second = HostDevice(1);
  const auto stream = *first->MakeStream();
  std::atomic<bool> freed = false;
  DeviceMemory own = *first->Allocate(10);
  std::thread freeing;
  {
    const Held held(*stream);
    second->Allocate(10)->reset();
    freeing = std::thread([&] {
      own.reset();
      freed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time enough to go wrong
    EXPECT_FALSE(freed);
  }
  freeing.join();
  EXPECT_TRUE(freed);
}

}  // namespace
}  // namespace thinwire
