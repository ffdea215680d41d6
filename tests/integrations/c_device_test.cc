// The C interface with tensors on a device: CPU threads in place of libthinwire_cuda.so.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "kernels/device_api.h"

namespace {

using thinwire::kernels::DeviceApi;

tw_options OptionsFor(int rank, const char* group) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = 2;
  options.local_group = group;
  options.device = "cuda";
  options.cuda_library = THINWIRE_STAND_IN;
  options.timeout_ms = 10000;
  return options;
}

class CDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (tw_cuda_device_count(THINWIRE_STAND_IN, &count) != TW_OK) GTEST_SKIP() << tw_last_error();
    ASSERT_GE(count, 1);
    void* const library = dlopen(THINWIRE_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    using Function = const DeviceApi* (*)();
    api_ = reinterpret_cast<Function>(dlsym(library, thinwire::kernels::kDeviceApiSymbol))();
  }

  // Calls body(comm, memory) on one thread per rank; the memory holds 10,000 floats of rank + 1.
  template <typename Body>
  void RunRanks(const char* group, Body body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([=, this] {
        const tw_options options = OptionsFor(rank, group);
        tw_comm* comm = nullptr;
        ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
        void* memory = nullptr;
        ASSERT_EQ(api_->allocate(0, kCount * sizeof(float), &memory), 0);
        Fill(memory, static_cast<float>(rank + 1));
        body(comm, memory);
        tw_comm_destroy(comm);
        api_->release(0, memory);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Fill(void* memory, float value) {
    const std::vector<float> values(kCount, value);
    api_->copy(0, memory, values.data(), kCount * sizeof(float), nullptr);
    Synchronize(nullptr);
  }
  void ExpectAll(const void* memory, float value, void* stream) {
    std::vector<float> values(kCount);
    api_->copy(0, values.data(), memory, kCount * sizeof(float), stream);
    Synchronize(stream);
    for (const float got : values) ASSERT_NEAR(got, value, 0.15f);
  }
  void Synchronize(void* stream) {
    void* event = nullptr;
    api_->make_event(0, &event);
    api_->record(0, event, stream);
    while (api_->query(0, event) == thinwire::kernels::kBusy) std::this_thread::yield();
    api_->destroy_event(0, event);
  }

  static constexpr size_t kCount = 100000;
  const DeviceApi* api_ = nullptr;
};

TEST_F(CDeviceTest, AllReduceInTheOrderOfAStream) {
  RunRanks("c_stream", [this](tw_comm* comm, void* memory) {
    void* stream = nullptr;
    ASSERT_EQ(api_->make_stream(0, &stream), 0);
    ASSERT_EQ(tw_all_reduce(memory, memory, kCount, TW_F32, TW_SUM, comm, stream), TW_OK)
        << tw_last_error();
    ExpectAll(memory, 3.0f, stream);
    api_->destroy_stream(0, stream);
  });
}

TEST_F(CDeviceTest, WaitMayNameAnotherStream) {
  RunRanks("c_wait", [this](tw_comm* comm, void* memory) {
    void* later = nullptr;
    ASSERT_EQ(api_->make_stream(0, &later), 0);
    tw_work* work = nullptr;
    ASSERT_EQ(
        tw_all_reduce_async(memory, memory, kCount, TW_F32, TW_MEAN, comm, nullptr, "g", 0, &work),
        TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_wait_stream(work, later), TW_OK) << tw_last_error();
    ExpectAll(memory, 1.5f, later);
    size_t kept = 0;
    EXPECT_EQ(tw_residual_count(comm, &kept), TW_OK);
    EXPECT_EQ(kept, 1u);
    std::vector<float> first(kCount), second(kCount);
    EXPECT_EQ(tw_residual_get(comm, "g", first.data(), second.data(), nullptr, kCount), TW_OK);
    api_->destroy_stream(0, later);
  });
}

TEST_F(CDeviceTest, HostMemoryIsRefused) {
  RunRanks("c_host", [this](tw_comm* comm, void*) {
    std::vector<float> values(kCount);
    EXPECT_EQ(tw_all_reduce(values.data(), values.data(), kCount, TW_F32, TW_MEAN, comm, nullptr),
              TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("cuda:0"), std::string::npos) << tw_last_error();
  });
}

TEST_F(CDeviceTest, AnotherDeviceIsRefused) {
  tw_options options = OptionsFor(0, "c_which");
  tw_comm* comm = nullptr;
  options.device = "cuda:99";
  EXPECT_EQ(tw_comm_create(&options, &comm), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("no cuda:99"), std::string::npos) << tw_last_error();
}

TEST(CDevice, ADeviceThatCannotBeHadIsUnavailable) {
  tw_options options = OptionsFor(0, "c_none");
  options.cuda_library = "/nowhere/libthinwire_cuda.so";
  tw_comm* comm = nullptr;
  EXPECT_EQ(tw_comm_create(&options, &comm), TW_UNAVAILABLE);
  EXPECT_EQ(comm, nullptr);
  EXPECT_NE(std::string(tw_last_error()).find("host memory"), std::string::npos);
  int count = 7;
  EXPECT_EQ(tw_cuda_device_count("/nowhere/libthinwire_cuda.so", &count), TW_UNAVAILABLE);
  EXPECT_EQ(count, 0);
}

TEST(CDevice, UnknownDevicesAreRefused) {
  for (const char* name : {"cud", "cuda:", "cuda:x", "gpu"}) {
    tw_options options = OptionsFor(0, "c_unknown");
    options.device = name;
    tw_comm* comm = nullptr;
    EXPECT_EQ(tw_comm_create(&options, &comm), TW_INVALID_ARGUMENT) << name;
  }
}

}  // namespace
