// Ranks under the shim, as threads of one process over the fake NCCL. Each has its own shim, as if
// it were a process, and its own device.
#ifndef THINWIRE_TESTS_INTEGRATIONS_NCCL_SHIM_RANKS_H_
#define THINWIRE_TESTS_INTEGRATIONS_NCCL_SHIM_RANKS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "integrations/nccl_shim/nccl_shim.h"
#include "tests/transport/connect_nccl.h"

namespace thinwire {

using Environment = std::map<std::string, std::string>;

// The host's device, whose streams claim to be captured if `capturing` is 1. Counts the pieces that
// are allocated, and those released on each device.
struct WatchedDevices {
  static inline std::atomic<int> capturing{0}, allocated{0};
  static inline std::array<std::atomic<int>, 8> released{};

  static const kernels::DeviceApi& Api() {
    static const kernels::DeviceApi api = [] {
      kernels::DeviceApi watched = kernels::HostDeviceApi();
      watched.is_capturing = [](int, void*, int* answer) { return *answer = capturing, 0; };
      watched.allocate = [](int ordinal, size_t bytes, void** memory) {
        ++allocated;
        return kernels::HostDeviceApi().allocate(ordinal, bytes, memory);
      };
      watched.release = [](int ordinal, void* memory) {
        --allocated;
        ++released.at(ordinal);
        return kernels::HostDeviceApi().release(ordinal, memory);
      };
      watched.release_pinned = [](int ordinal, void* memory) {
        ++released.at(ordinal);
        return kernels::HostDeviceApi().release_pinned(ordinal, memory);
      };
      return watched;
    }();
    return api;
  }
};

class ShimRank {
 public:
  // `node`: the number of the rank's node.
  ShimRank(int rank, const Environment& environment, int node)
      : device_(DeviceOfRank(rank)), shim_(SettingsIn(environment), Means(node)) {
    stream_ = *device_->MakeStream();
  }

  NcclShim& shim() { return shim_; }
  NcclHandle comm = nullptr;

  // The calls that a program makes. A buffer name stands for the same memory in every call.
  template <typename T>
  std::vector<T> Reduce(const std::vector<T>& values, NcclDataType type, NcclReduceOp op,
                        const std::string& name = "buffer", bool in_place = true) {
    const size_t bytes = values.size() * sizeof(T);
    DeviceMemory& in = memory_[name];
    DeviceMemory& out = in_place ? in : memory_[name + ".out"];
    if (in == nullptr) in = *device_->Allocate(bytes);
    if (out == nullptr) out = *device_->Allocate(bytes);
    stream_->Copy(in.get(), values.data(), bytes);
    result = shim_.Reduce({Collective::kAllReduce, in.get(), out.get(), values.size(), type, op,
                           comm, stream_->handle(), config});
    std::vector<T> reduced(values.size());
    stream_->Copy(reduced.data(), out.get(), bytes);
    EXPECT_TRUE(stream_->Synchronize(Clock::now() + std::chrono::seconds(20)).ok());
    return reduced;
  }
  std::vector<float> Sum(const std::vector<float>& values, const std::string& name = "buffer") {
    return Reduce(values, kNcclF32, kNcclSum, name);
  }
  // The program has `ranks` ranks. In place, the result goes into this rank's part of the input.
  std::vector<float> Scatter(const std::vector<float>& values, int rank, int ranks,
                             bool in_place = false) {
    const size_t count = values.size() / ranks;
    const DeviceMemory in = *device_->Allocate(values.size() * sizeof(float));
    const DeviceMemory apart = *device_->Allocate(count * sizeof(float));
    uint8_t* const out = in_place ? in.get() + rank * count * sizeof(float) : apart.get();
    stream_->Copy(in.get(), values.data(), values.size() * sizeof(float));
    result = shim_.Reduce({Collective::kReduceScatter, in.get(), out, count, kNcclF32, kNcclSum,
                           comm, stream_->handle(), config});
    std::vector<float> reduced(count);
    stream_->Copy(reduced.data(), out, count * sizeof(float));
    EXPECT_TRUE(stream_->Synchronize(Clock::now() + std::chrono::seconds(20)).ok());
    return reduced;
  }
  const void* config = nullptr;  // for the next calls
  NcclResult result = kNcclOk;   // from the last call

  DeviceStream& stream() { return *stream_; }
  Device& device() { return *device_; }

  std::string said() const {
    const absl::MutexLock lock(&mu_);
    return said_;
  }
  // Set before the shim's first call to change the device that it finds.
  std::function<absl::StatusOr<std::shared_ptr<Device>>(int)> open_device = [](int ordinal) {
    return MakeDevice(WatchedDevices::Api(), ordinal, "host:" + std::to_string(ordinal));
  };

 private:
  static NcclShimSettings SettingsIn(const Environment& environment) {
    return ReadNcclShimSettings([&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }
  static void* FindInFake(const char* name) {
    return dlsym(dlopen(THINWIRE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL), name);
  }
  NcclShimMeans Means(int node) {
    return {FindNcclNext(FindInFake), [] { return LoadNccl(THINWIRE_FAKE_NCCL); },
            [this](int ordinal) { return open_device(ordinal); },
            [this](const std::string& line) {
              const absl::MutexLock lock(&mu_);
              said_ += line + "\n";
            },
            "node " + std::to_string(node)};
  }

  mutable absl::Mutex mu_;
  std::string said_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Device> device_;
  std::unique_ptr<DeviceStream> stream_;
  std::map<std::string, DeviceMemory> memory_;
  NcclShim shim_;
};

using Ranks = std::vector<std::unique_ptr<ShimRank>>;

// Returns a communicator id, as rank 0's program gets it.
inline NcclUniqueId NewId(ShimRank& rank) {
  NcclUniqueId id;
  EXPECT_EQ(rank.shim().GetUniqueId(&id), kNcclOk);
  return id;
}

// Calls body(rank) on one thread per rank, after creating a communicator and before destroying it.
inline void OnRanks(Ranks& ranks, const std::function<void(int)>& body) {
  const NcclUniqueId id = NewId(*ranks[0]);
  std::vector<std::thread> threads;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    threads.emplace_back([&, r] {
      ShimRank& rank = *ranks[r];
      EXPECT_EQ(rank.shim().CommInitRank(&rank.comm, static_cast<int>(ranks.size()), id, r),
                kNcclOk);
      body(r);
      EXPECT_EQ(rank.shim().CommDestroy(rank.comm), kNcclOk);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline Ranks RanksWith(int world, const std::function<Environment(int rank)>& environment,
                       int local_size = 1000) {
  Fake();
  Ranks ranks;
  for (int r = 0; r < world; ++r) {
    ranks.push_back(std::make_unique<ShimRank>(r, environment(r), r / local_size));
  }
  return ranks;
}

// Several shards with blocks of 256 elements, and a last block that is not whole.
inline constexpr size_t kCount = 5000;

inline Environment OptedIn(const std::string& codec = "int8") {
  return {{"THINWIRE_NCCL_CODEC", codec},
          {"THINWIRE_NCCL_MIN_BYTES", "1024"},
          {"THINWIRE_TIMEOUT_S", "20"}};
}

inline Ranks RanksWithCodec(int world, const std::string& codec) {
  return RanksWith(world, [&](int) { return OptedIn(codec); });
}

inline std::vector<float> ValuesOf(int rank, size_t count = kCount) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = std::sin(0.37f * static_cast<float>(i + 1) * static_cast<float>(rank + 1));
  }
  return values;
}

// The sum as the fake NCCL computes it.
inline std::vector<float> ExactSum(int world, size_t count = kCount) {
  std::vector<double> sum(count);
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<float> values = ValuesOf(rank, count);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return {sum.begin(), sum.end()};
}

inline float LargestError(const std::vector<float>& got, const std::vector<float>& exact) {
  float largest = 0;
  for (size_t i = 0; i < got.size(); ++i) largest = std::max(largest, std::fabs(got[i] - exact[i]));
  return largest;
}

class NcclShimTest : public testing::Test {
 protected:
  void SetUp() override { misuses_ = Fake().misuses; }
  void TearDown() override {
    EXPECT_EQ(Fake().misuses, misuses_);
    EXPECT_EQ(WatchedDevices::allocated, 0);
  }

 private:
  int misuses_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_INTEGRATIONS_NCCL_SHIM_RANKS_H_
