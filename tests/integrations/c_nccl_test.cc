// The C interface over NCCL, with CPU threads in place of GPUs and a fake libnccl.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "kernels/device_api.h"
#include "tests/transport/fake_nccl/fake_nccl.h"

namespace {

using thinwire::FakeNccl;
using thinwire::kernels::DeviceApi;

template <typename Function>
Function Find(const char* library, const char* name) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  EXPECT_NE(handle, nullptr) << dlerror();
  return reinterpret_cast<Function>(dlsym(handle, name));
}

class CNcclTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (tw_cuda_device_count(THINWIRE_STAND_IN, &count) != TW_OK) GTEST_SKIP() << tw_last_error();
    api_ = Find<const DeviceApi* (*)()>(THINWIRE_STAND_IN, thinwire::kernels::kDeviceApiSymbol)();
    fake_ = Find<FakeNccl* (*)()>(THINWIRE_FAKE_NCCL, thinwire::kFakeNcclSymbol)();
    fake_->queue = Find<thinwire::FakeQueue>(THINWIRE_STAND_IN, "tw_host_device_queue");
    std::string pattern = (std::filesystem::temp_directory_path() / "c_nccl.XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
    if (fake_ != nullptr) EXPECT_EQ(fake_->misuses, 0);
  }

  tw_options OptionsFor(int rank, const char* transport, const char* device) const {
    tw_options options;
    tw_options_init(&options);
    options.rank = rank;
    options.size = 2;
    options.store_path = folder_.c_str();
    options.group = transport;
    options.device = device;
    options.cuda_library = THINWIRE_STAND_IN;
    options.transport = transport;
    options.ucx_library = "/nowhere/libucp.so.0";
    options.nccl_library = THINWIRE_FAKE_NCCL;
    options.codec = "int4";
    options.timeout_ms = 20000;
    return options;
  }

  // Checks the result of an allreduce, and returns the transport's description of itself.
  std::string Reduce(int rank, const char* transport, const char* device, int ordinal) {
    const tw_options options = OptionsFor(rank, transport, device);
    tw_comm* comm = nullptr;
    if (tw_comm_create(&options, &comm) != TW_OK) return tw_last_error();
    constexpr size_t kCount = 300000;
    std::vector<float> values(kCount, static_cast<float>(rank + 1));
    void* memory = nullptr;
    EXPECT_EQ(api_->allocate(ordinal, kCount * sizeof(float), &memory), 0);
    const auto copy = [&](void* to, const void* from) {
      void* event = nullptr;
      api_->copy(ordinal, to, from, kCount * sizeof(float), nullptr);
      api_->make_event(ordinal, &event);
      api_->record(ordinal, event, nullptr);
      while (api_->query(ordinal, event) == thinwire::kernels::kBusy) std::this_thread::yield();
      api_->destroy_event(ordinal, event);
    };
    copy(memory, values.data());
    EXPECT_EQ(tw_all_reduce(memory, memory, kCount, TW_F32, TW_MEAN, comm, nullptr), TW_OK)
        << tw_last_error();
    copy(values.data(), memory);
    for (const float value : values) EXPECT_NEAR(value, 1.5f, 0.15f);
    char words[64] = "";
    EXPECT_EQ(tw_comm_transport(comm, words, sizeof(words)), TW_OK);
    int by_order = -1;
    EXPECT_EQ(tw_comm_matches_by_order(comm, &by_order), TW_OK);
    EXPECT_EQ(by_order, std::string_view(words).substr(0, 4) == "nccl" ? 1 : 0);
    tw_comm_destroy(comm);
    api_->release(ordinal, memory);
    return words;
  }

  const DeviceApi* api_ = nullptr;
  FakeNccl* fake_ = nullptr;
  std::string folder_;
};

TEST_F(CNcclTest, RanksWithDevicesOfTheirOwnRunOnIt) {
  for (const char* transport : {"nccl", "auto"}) {
    std::vector<std::string> words(2);
    std::thread peer([&] { words[1] = Reduce(1, transport, "cuda:1", 1); });
    words[0] = Reduce(0, transport, "cuda:0", 0);
    peer.join();
    EXPECT_EQ(words, std::vector<std::string>(2, "nccl 2.30.7"));
  }
  EXPECT_EQ(fake_->aborted, 0);
}

TEST_F(CNcclTest, RanksThatShareADeviceDoNot) {
  std::vector<std::string> words(2);
  std::thread peer([&] { words[1] = Reduce(1, "auto", "cuda:0", 0); });
  words[0] = Reduce(0, "auto", "cuda:0", 0);
  peer.join();
  EXPECT_EQ(words, std::vector<std::string>(2, "gloo over TCP"));
}

TEST(CNccl, TheVersionIsThatOfTheLibrary) {
  char version[64] = "";
  EXPECT_EQ(tw_nccl_version(THINWIRE_FAKE_NCCL, version, sizeof(version)), TW_OK);
  EXPECT_STREQ(version, "2.30.7");
  EXPECT_EQ(tw_nccl_version("/nowhere/libnccl.so.2", version, sizeof(version)), TW_UNAVAILABLE);
  EXPECT_EQ(tw_nccl_version(nullptr, nullptr, 0), TW_INVALID_ARGUMENT);
}

}  // namespace
