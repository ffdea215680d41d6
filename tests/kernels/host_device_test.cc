// Devices as other libraries see them: events that the host polls without waiting, the thread's
// current device, identities. It runs on CPU threads, which can be made to wait.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compress/error_feedback.h"
#include "tests/host_device/host_team.h"
#include "tests/kernels/devices.h"
#include "tests/kernels/watched_device.h"

namespace thinwire {
namespace {

std::shared_ptr<Device> HostDevice(int ordinal) {
  return MakeDevice(kernels::HostDeviceApi(), ordinal, "host:" + std::to_string(ordinal));
}

// A machine whose driver supports CUDA up to version kDriver; 0: no driver.
template <int kDriver>
absl::Status DevicesWithDriver(int runtime) {
  kernels::DeviceApi api = kernels::HostDeviceApi();
  api.runtime_version = runtime;
  api.device_count = [](int*) { return kernels::kInsufficientDriver; };
  api.driver_version = [](int* version) { return *version = kDriver, 0; };
  return CountDevices(api).status();
}

TEST(HostDevice, AnOldDriverIsNamedWithTheOneThatIsNeeded) {
  const auto expect = [](const absl::Status& status, std::initializer_list<const char*> words) {
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    for (const char* word : words) {
      EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << " in " << status;
    }
  };
  expect(DevicesWithDriver<12040>(13000),
         {"driver is for CUDA 12.4", "CUDA 13.0", "needs driver 580 or newer", "on the host"});
  expect(DevicesWithDriver<11080>(12090), {"CUDA 11.8", "CUDA 12.9", "needs driver 525 or newer"});
  expect(DevicesWithDriver<0>(13000), {"there is no NVIDIA driver"});
  EXPECT_EQ(*CountDevices(kernels::HostDeviceApi()), kernels::kHostDevices);
}

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

// An event returns to its pool once nobody uses it, even before it is reached, and is then recorded
// on another stream. Reaching the second point must not release those that wait for the first.
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

using std::chrono::milliseconds;
using std::chrono::steady_clock;

TEST(Synchronize, SleepsUntilTheStreamIsThere) {
  const auto device = WatchedDevice();
  const auto stream = *device->MakeStream();
  const int before = device_counts.queries;
  const auto began = steady_clock::now();
  std::thread release;
  {
    auto held = std::make_unique<Held>(*stream);
    release = std::thread([held = std::move(held)]() mutable {
      std::this_thread::sleep_for(milliseconds(250));
      held.reset();
    });
    EXPECT_TRUE(stream->Synchronize(InTime()).ok());
  }
  const auto looks = (steady_clock::now() - began) / milliseconds(100);
  EXPECT_LE(device_counts.queries - before, 2 + looks);
  release.join();
}

TEST(Synchronize, EndsAtTheDeadlineAndTheStreamGoesOn) {
  const auto device = HostDevice(0);
  const auto stream = *device->MakeStream();
  {
    const Held held(*stream);
    const absl::Status late = stream->Synchronize(steady_clock::now() + milliseconds(5));
    EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
    EXPECT_NE(late.message().find("host:0"), std::string::npos) << late;
  }
  EXPECT_TRUE(stream->Synchronize(InTime()).ok());
}

TEST(Synchronize, GivesUpWhenNobodyNeedsItAnyMore) {
  const auto device = HostDevice(0);
  const auto stream = *device->MakeStream();
  const Held held(*stream);
  const absl::Status given_up =
      stream->SynchronizeWhile(InTime(), [] { return absl::CancelledError("the group ended"); });
  EXPECT_EQ(given_up, absl::CancelledError("the group ended"));
}

// As in CUDA, no callback is called after a failure.
struct LostCall {
  void (*function)(void*) = nullptr;
  void* argument = nullptr;
} lost_call;

TEST(Synchronize, LearnsOfAFailureAfterWhichNobodyCalls) {
  kernels::DeviceApi api = kernels::HostDeviceApi();
  api.call = [](int, void (*function)(void*), void* argument, void*) {
    lost_call = {function, argument};
    return 0;
  };
  api.query = [](int, void*) { return lost_call.function == nullptr ? kernels::kBusy : 2; };
  const auto device = MakeDevice(api, 0, "failing:0");
  const auto stream = *device->MakeStream();
  const absl::Status failed = stream->Synchronize(InTime());
  EXPECT_TRUE(absl::IsInternal(failed)) << failed;
  EXPECT_NE(failed.message().find("failing:0 failed"), std::string::npos) << failed;
  lost_call.function(lost_call.argument);  // nobody waits for it, and its memory is freed
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

// Freeing waits for the work of that device, but not for another rank's device.
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
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // enough for a wrong free
    EXPECT_FALSE(freed);
  }
  freeing.join();
  EXPECT_TRUE(freed);
}

// A checkpoint takes linear time: a bucket of many parameters is read once, and a load reads
// nothing that it replaces.
TEST(ErrorFeedback, ACheckpointReadsEachArrayOfABucketOnce) {
  for (const size_t parameters : {3u, 48u}) {
    ErrorFeedback feedback(WatchedDevice());
    BucketLayout layout;
    layout.arrays = {std::string(kMomentum)};
    for (size_t i = 0; i < parameters; ++i) {
      layout.segments.push_back({absl::StrCat("p", i), 0, 5, 5, 0});
    }
    ASSERT_TRUE(feedback.Bind("0", layout).ok());
    std::vector<std::vector<float>> values(3 * parameters, std::vector<float>(5));
    std::vector<StateArray> arrays;
    for (size_t i = 0; i < parameters; ++i) {
      const std::string& name = layout.segments[i].name;
      arrays.push_back({name, kFirstHop, values[3 * i]});
      arrays.push_back({name, kSecondHop, values[3 * i + 1]});
      arrays.push_back({name, kMomentum, values[3 * i + 2]});
    }
    const int before = device_counts.copies_queued;
    ASSERT_TRUE(feedback.Export(arrays).ok());
    EXPECT_EQ(device_counts.copies_queued - before, 2) << "of " << parameters << " parameters";
    ASSERT_TRUE(feedback.Import(arrays, 4.0f).ok());
    EXPECT_EQ(device_counts.copies_queued - before, 2) << "of " << parameters << " parameters";
  }
}

// Errors that a kernel can make with bytes that it fetches while it continues.
class StagedDeathTest : public testing::Test {
 protected:
  static constexpr unsigned kBytes = 16;

  void Fetch(unsigned thread) { staged_.Fetch<kBytes>(team_, thread, 0, from_); }
  uint8_t Get(unsigned thread) {
    uint8_t byte = 0;
    staged_.Get<1>(team_, thread, 0, &byte);
    return byte;
  }

  kernels::HostTeam team_;
  kernels::HostTeam::Staged<kBytes> staged_;
  alignas(kBytes) const uint8_t from_[kBytes] = {7};
};

TEST_F(StagedDeathTest, LanesGetAwaitedBytesAfterASyncWarp) {
  EXPECT_DEATH(Get(0), "gets what nobody fetched");
  Fetch(3);
  team_.CommitFetches();
  team_.AwaitFetches<1>();
  EXPECT_DEATH(Get(3), "thread 3 gets what has not arrived");
  team_.AwaitFetches<0>();
  EXPECT_EQ(Get(3), 7);
  EXPECT_DEATH(Get(4), "thread 4 gets what has not arrived");
  team_.SyncWarp();
  EXPECT_EQ(Get(4), 7);
  EXPECT_DEATH(Get(kernels::kWarp), "gets another warp's bytes");
}

TEST_F(StagedDeathTest, NobodyFetchesOverWhatIsRead) {
  Fetch(3);
  EXPECT_DEATH(Fetch(4), "fetches over what is being fetched");
  team_.CommitFetches();
  team_.AwaitFetches<0>();
  team_.SyncWarp();
  EXPECT_EQ(Get(4), 7);
  EXPECT_DEATH(Fetch(3), "fetches over what is read");
  team_.SyncWarp();
  Fetch(3);
}

}  // namespace
}  // namespace thinwire
