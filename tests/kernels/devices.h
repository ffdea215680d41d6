// The devices that tests of kernels and device buffers run on: CPU threads in place of a GPU, and
// the first CUDA device if there is one.
#ifndef THINWIRE_TESTS_KERNELS_DEVICES_H_
#define THINWIRE_TESTS_KERNELS_DEVICES_H_

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "compress/backend.h"
#include "kernels/device.h"
#include "kernels/tile.h"
#include "tests/effort.h"
#include "tests/host_device/host_device.h"

namespace thinwire {

// Runs the stand-in with whole tiles only, as launches of many elements do.
template <auto kEntry, typename Launch>
int WithWholeTiles(int ordinal, const Launch* launch, void* stream) {
  Launch whole = *launch;
  const auto tiles_of = [](size_t numel) {
    return static_cast<uint32_t>((numel + kernels::kTile - 1) / kernels::kTile);
  };
  if constexpr (std::is_same_v<Launch, kernels::ReduceLaunch>) {
    whole.threads = kernels::kThreads;
    whole.tiles = tiles_of(whole.numel);
  } else {
    whole.jobs.threads = kernels::kThreads;
    whole.jobs.tiles = 0;
    for (uint32_t i = 0; i < whole.jobs.count; ++i) {
      whole.jobs.job[i].first_tile = whole.jobs.tiles;
      whole.jobs.tiles += tiles_of(whole.jobs.job[i].numel);
    }
  }
  return (kernels::HostDeviceApi().*kEntry)(ordinal, &whole, stream);
}

inline const kernels::DeviceApi& WholeTilesApi() {
  using Api = kernels::DeviceApi;
  static const Api api = [] {
    Api whole = kernels::HostDeviceApi();
    whole.encode = WithWholeTiles<&Api::encode, kernels::EncodeLaunch>;
    whole.decode = WithWholeTiles<&Api::decode, kernels::DecodeLaunch>;
    whole.accumulate = WithWholeTiles<&Api::accumulate, kernels::AccumulateLaunch>;
    whole.end_momentum = WithWholeTiles<&Api::end_momentum, kernels::MomentumLaunch>;
    whole.reduce = WithWholeTiles<&Api::reduce, kernels::ReduceLaunch>;
    return whole;
  }();
  return api;
}

// `name` is "host", "whole" or "cuda"; "cuda" may return Unimplemented with the reason.
inline absl::StatusOr<std::shared_ptr<Device>> TestDevice(const std::string& name) {
  if (name == "whole") return MakeDevice(WholeTilesApi(), 0, "host:0");
  if (name == "host") return MakeDevice(kernels::HostDeviceApi(), 0, "host:0");
  return OpenDevice(name, "libthinwire_cuda.so");
}

inline std::chrono::steady_clock::time_point InTime() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

// Returns values stored as a tensor of a dtype.
inline std::vector<uint8_t> Stored(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
  const auto* wire = reinterpret_cast<const uint8_t*>(values.data());
  ScalarBackend().Decode({}, wire, {bytes.data(), values.size(), dtype});
  return bytes;
}

// Recycles device memory and pinned host memory between tests: a GPU takes longer to allocate than
// to run most kernels, and the tests allocate some 290,000 times. Sizes are rounded up to powers of
// two, which would hide errors from sanitizers, so with a sanitizer every test allocates its own
// memory.
class SpareMemory {
 public:
  enum class Kind { kDevice, kPinned };

  static DeviceMemory Take(Device& device, Kind kind, size_t bytes) {
    const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
    const bool for_sanitizer = test != nullptr && test->name() == kForSanitizers;
    if (kSanitized || for_sanitizer) return Allocate(device, kind, bytes);
    const Key key(device.name(), kind, std::bit_ceil(bytes));
    DeviceMemory memory = All().Find(key);
    if (memory == nullptr) memory = Allocate(device, kind, std::get<size_t>(key));
    uint8_t* const begin = memory.get();
    return {begin, [key, memory = std::move(memory)](uint8_t*) { All().Put(key, memory); }};
  }

 private:
  using Key = std::tuple<std::string, Kind, size_t>;
  static constexpr std::string_view kForSanitizers = "EveryKernelOnce";  // on GPUs

  // Never destroyed: the driver may be gone before the program's static variables.
  static SpareMemory& All() {
    static SpareMemory* const all = new SpareMemory;
    return *all;
  }
  static DeviceMemory Allocate(Device& device, Kind kind, size_t bytes) {
    return kind == Kind::kDevice ? *device.Allocate(bytes) : *device.AllocatePinned(bytes);
  }
  DeviceMemory Find(const Key& key) {
    const absl::MutexLock lock(&mu_);
    std::vector<DeviceMemory>& pieces = pieces_[key];
    if (pieces.empty()) return nullptr;
    DeviceMemory memory = std::move(pieces.back());
    pieces.pop_back();
    return memory;
  }
  void Put(const Key& key, DeviceMemory memory) {
    const absl::MutexLock lock(&mu_);
    pieces_[key].push_back(std::move(memory));
  }

  absl::Mutex mu_;
  std::map<Key, std::vector<DeviceMemory>> pieces_ ABSL_GUARDED_BY(mu_);
};

// Bytes on a device between two guards, whose content shows a write out of bounds. Before any goes
// out of scope, a test must Read one that its last work wrote: that waits for all work.
class OnDevice {
 public:
  // `from`: the initial bytes; null: unspecified.
  OnDevice(Device& device, DeviceStream& stream, size_t bytes, size_t skew = 0,
           const void* from = nullptr)
      : stream_(stream),
        bytes_(bytes),
        begin_(kGuard + skew),
        size_(begin_ + bytes + kGuard),
        pinned_(SpareMemory::Take(device, SpareMemory::Kind::kPinned, size_)),
        memory_(SpareMemory::Take(device, SpareMemory::Kind::kDevice, size_)) {
    std::memset(pinned_.get(), kMark, size_);
    if (from != nullptr && bytes > 0) std::memcpy(pinned_.get() + begin_, from, bytes);
    stream_.Copy(memory_.get(), pinned_.get(), size_);
  }

  uint8_t* data() { return memory_.get() + begin_; }
  float* floats() { return reinterpret_cast<float*>(data()); }

  // Waits for the stream.
  std::vector<uint8_t> Read() {
    stream_.Copy(pinned_.get(), memory_.get(), size_);
    EXPECT_TRUE(stream_.Synchronize(InTime()).ok());
    for (size_t i = 0; i < size_; ++i) {
      if (i >= begin_ && i < begin_ + bytes_) continue;
      EXPECT_EQ(pinned_[i], kMark) << "byte " << i << " of " << size_ << " is a guard";
    }
    return {pinned_.get() + begin_, pinned_.get() + begin_ + bytes_};
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kMark = 0xA5;
  DeviceStream& stream_;
  const size_t bytes_, begin_, size_;
  DeviceMemory pinned_, memory_;
};

// Keeps a stream of the host's device busy until the end of the scope.
class Held {
 public:
  explicit Held(DeviceStream& stream) {
    kernels::QueueOnHostDevice(stream.handle(), [over = over_] { over->WaitForNotification(); });
  }
  ~Held() { over_->Notify(); }

 private:
  // Shared, since the stream may still access it after the scope has ended.
  const std::shared_ptr<absl::Notification> over_ = std::make_shared<absl::Notification>();
};

// Base of kernel tests. The parameter is a device's name; skipped if this machine does not have it.
class KernelsOnDevice : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice(GetParam());
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
    stream_ = *device_->MakeStream();
  }

  OnDevice Put(const std::vector<uint8_t>& bytes, size_t skew = 0) {
    return OnDevice(*device_, *stream_, bytes.size(), skew, bytes.data());
  }
  const Backend& backend() const { return stream_->backend(); }

  std::shared_ptr<Device> device_;
  std::unique_ptr<DeviceStream> stream_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_KERNELS_DEVICES_H_
