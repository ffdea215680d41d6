// A thread's current context after a call on a device. The driver is a stand-in with a stack of
// contexts per thread, like CUDA's.
#include "kernels/cuda_contexts.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace thinwire::kernels {
namespace {

constexpr int kDevices = 3, kNoSuchDevice = 101, kRefused = 2;
int contexts[kDevices];  // one address for each device's context
thread_local std::vector<void*> stack;
thread_local int pushes = 0, push_error = 0;

constexpr ContextCalls kFake = {
    .primary =
        [](int ordinal, void** context) {
          if (ordinal < 0 || ordinal >= kDevices) return kNoSuchDevice;
          *context = &contexts[ordinal];
          return 0;
        },
    .current =
        [](void** context) {
          *context = stack.empty() ? nullptr : stack.back();
          return 0;
        },
    .push =
        [](void* context) {
          if (push_error != 0) return push_error;
          stack.push_back(context);
          ++pushes;
          return 0;
        },
    .pop =
        [](void** context) {
          *context = stack.back();
          stack.pop_back();
          return 0;
        },
};

class ContextsTest : public testing::Test {
 protected:
  void SetUp() override { stack.clear(), pushes = push_error = 0; }
};

TEST_F(ContextsTest, AThreadThatChoseNoDeviceHasNoneAfterwards) {
  std::thread([] {
    {
      const CurrentDevice here(kFake, 2);
      EXPECT_EQ(here.error(), 0);
      EXPECT_EQ(stack, std::vector<void*>{&contexts[2]});
    }
    EXPECT_TRUE(stack.empty());
  }).join();
}

TEST_F(ContextsTest, AThreadsOwnDeviceComesBack) {
  stack = {&contexts[1]};
  {
    const CurrentDevice outer(kFake, 2);
    {
      const CurrentDevice inner(kFake, 0);
      EXPECT_EQ(stack.back(), &contexts[0]);
    }
    EXPECT_EQ(stack.back(), &contexts[2]);
  }
  EXPECT_EQ(stack, std::vector<void*>{&contexts[1]});
}

TEST_F(ContextsTest, TheRightDeviceStaysAsItIs) {
  stack = {&contexts[1]};
  { const CurrentDevice here(kFake, 1); }
  EXPECT_EQ(pushes, 0);
  EXPECT_EQ(stack, std::vector<void*>{&contexts[1]});
}

TEST_F(ContextsTest, AFailureLeavesTheThreadAsItWas) {
  EXPECT_EQ(CurrentDevice(kFake, kDevices).error(), kNoSuchDevice);
  push_error = kRefused;
  EXPECT_EQ(CurrentDevice(kFake, 1).error(), kRefused);
  EXPECT_TRUE(stack.empty());
}

}  // namespace
}  // namespace thinwire::kernels
