// Threads that never chose a device, on a GPU: our calls run on it and leave no context behind.
#include <gtest/gtest.h>

#include <thread>

#include "kernels/cuda_contexts.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

TEST(CudaThread, HasNoContextAfterOurCalls) {
  const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  std::thread([&] {
    {
      const std::unique_ptr<DeviceStream> stream = *(*device)->MakeStream();
      OnDevice memory(**device, *stream, 1000);
      memory.Read();
      EXPECT_TRUE((*device)->Holds(memory.data()));
    }
    void* context = &context;
    ASSERT_EQ(kernels::DriverContextCalls().current(&context), 0);
    EXPECT_EQ(context, nullptr);
  }).join();
}

}  // namespace
}  // namespace thinwire
