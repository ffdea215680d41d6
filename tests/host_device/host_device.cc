#include "tests/host_device/host_device.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/host_device/host_stream.h"

namespace thinwire::kernels {
namespace {

constexpr int kNoMemory = 2, kNoSuchDevice = 101;  // CUDA's numbers, so that tests can share them
constexpr int kRuntimeVersion = 13000;

// The state of all devices.
class Machine {
 public:
  HostStream& StreamOf(int ordinal, void* handle) {
    return handle == nullptr ? defaults_.at(ordinal) : *static_cast<HostStream*>(handle);
  }

  void* MakeStream(int ordinal) {
    const absl::MutexLock lock(&mu_);
    auto stream = std::make_shared<HostStream>();
    void* const handle = stream.get();
    streams_.emplace(handle, OwnStream{ordinal, std::move(stream)});
    return handle;
  }
  void DestroyStream(void* handle) {
    OwnStream own;  // its thread is joined after the unlock
    const absl::MutexLock lock(&mu_);
    own = std::move(streams_.at(handle));
    streams_.erase(handle);
  }

  void* MakeEvent() {
    const absl::MutexLock lock(&mu_);
    auto event = std::make_shared<HostEvent>();
    void* const handle = event.get();
    events_.emplace(handle, std::move(event));
    return handle;
  }
  HostEventPtr EventOf(void* handle) {
    const absl::MutexLock lock(&mu_);
    return events_.at(handle);
  }
  void DestroyEvent(void* handle) {
    const absl::MutexLock lock(&mu_);
    events_.erase(handle);
  }

  void* Allocate(int ordinal, size_t bytes) {
    void* const memory =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr) return nullptr;
    const absl::MutexLock lock(&mu_);
    blocks_.emplace(static_cast<const uint8_t*>(memory), Block{ordinal, bytes});
    return memory;
  }
  // Waits for all work of the device, which may use the memory, as cudaFree does.
  void Release(int ordinal, void* memory) {
    defaults_.at(ordinal).Drain();
    for (const std::shared_ptr<HostStream>& stream : StreamsOf(ordinal)) stream->Drain();
    {
      const absl::MutexLock lock(&mu_);
      blocks_.erase(static_cast<const uint8_t*>(memory));
    }
    std::free(memory);
  }
  // Returns the device that owns the memory, or -1.
  int OrdinalOf(const void* address) {
    const absl::MutexLock lock(&mu_);
    const auto* at = static_cast<const uint8_t*>(address);
    auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return -1;
    --after;
    return at < after->first + after->second.bytes ? after->second.ordinal : -1;
  }

 private:
  struct OwnStream {
    int ordinal = 0;
    std::shared_ptr<HostStream> stream;
  };
  struct Block {
    int ordinal;
    size_t bytes;
  };
  static constexpr size_t kAlignment = 256;
  std::array<HostStream, kHostDevices> defaults_;

  std::vector<std::shared_ptr<HostStream>> StreamsOf(int ordinal) {
    const absl::MutexLock lock(&mu_);
    std::vector<std::shared_ptr<HostStream>> streams;
    for (auto& [handle, own] : streams_) {
      if (own.ordinal == ordinal) streams.push_back(own.stream);
    }
    return streams;
  }

  absl::Mutex mu_;
  std::map<void*, OwnStream> streams_ ABSL_GUARDED_BY(mu_);
  std::map<void*, HostEventPtr> events_ ABSL_GUARDED_BY(mu_);
  std::map<const uint8_t*, Block> blocks_ ABSL_GUARDED_BY(mu_);
};

Machine& TheMachine() {
  static Machine machine;
  return machine;
}

int Queue(int ordinal, void* stream, std::function<void()> work) {
  TheMachine().StreamOf(ordinal, stream).Push(std::move(work));
  return 0;
}

bool IsDevice(int ordinal) { return ordinal >= 0 && ordinal < kHostDevices; }

const char* ErrorText(int error) {
  switch (error) {
    case kNoMemory: return "out of memory";
    case kNoSuchDevice: return "invalid device ordinal";
    default: return "unknown error";
  }
}

int DeviceCount(int* count) { return *count = kHostDevices, 0; }
int DriverVersion(int* version) { return *version = kRuntimeVersion, 0; }
int DeviceOf(int, const void* address, int* holder) {
  return *holder = TheMachine().OrdinalOf(address), 0;
}

int Allocate(int ordinal, size_t bytes, void** memory) {
  if (!IsDevice(ordinal)) return kNoSuchDevice;
  *memory = TheMachine().Allocate(ordinal, bytes);
  return *memory == nullptr ? kNoMemory : 0;
}
int Release(int ordinal, void* memory) { return TheMachine().Release(ordinal, memory), 0; }
int AllocatePinned(int, size_t bytes, void** memory) {
  *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  return *memory == nullptr ? kNoMemory : 0;
}
int ReleasePinned(int, void* memory) { return std::free(memory), 0; }

int MakeStream(int ordinal, void** stream) { return *stream = TheMachine().MakeStream(ordinal), 0; }
int DestroyStream(int, void* stream) { return TheMachine().DestroyStream(stream), 0; }
int IsCapturing(int, void*, int* capturing) { return *capturing = 0; }  // there are no graphs
int MakeEvent(int, void** event) { return *event = TheMachine().MakeEvent(), 0; }
int DestroyEvent(int, void* event) { return TheMachine().DestroyEvent(event), 0; }

int Record(int ordinal, void* handle, void* stream) {
  const HostPointPtr point = TheMachine().EventOf(handle)->Record();
  return Queue(ordinal, stream, [point] { point->Reach(); });
}
int Wait(int ordinal, void* stream, void* handle) {
  const HostPointPtr point = TheMachine().EventOf(handle)->last();
  return Queue(ordinal, stream, [point] { point->Await(); });
}
int Query(int, void* event) { return TheMachine().EventOf(event)->last()->reached() ? 0 : kBusy; }

int Copy(int ordinal, void* to, const void* from, size_t bytes, void* stream) {
  return Queue(ordinal, stream, [=] { std::memmove(to, from, bytes); });
}

int Call(int ordinal, void (*function)(void*), void* argument, void* stream) {
  return Queue(ordinal, stream, [=] { function(argument); });
}

template <typename Launch>
int QueueLaunch(int ordinal, const Launch* launch, void* stream) {
  return Queue(ordinal, stream, [copy = *launch] { RunOnHost(copy); });
}

int Identify(int ordinal, char text[kIdentityBytes]) {
  return std::snprintf(text, kIdentityBytes, "threads %d", ordinal), 0;
}
int RunOn(int ordinal, void (*work)(void*), void* argument) {
  return IsDevice(ordinal) ? (work(argument), 0) : kNoSuchDevice;
}

}  // namespace

void QueueOnHostDevice(void* stream, std::function<void()> work) {
  Queue(0, stream, std::move(work));
}

const DeviceApi& HostDeviceApi() {
  static constexpr DeviceApi kApi = {
      .version = kDeviceApiVersion,
      .runtime_version = kRuntimeVersion,
      .error_text = ErrorText,
      .device_count = DeviceCount,
      .driver_version = DriverVersion,
      .device_of = DeviceOf,
      .allocate = Allocate,
      .release = Release,
      .allocate_pinned = AllocatePinned,
      .release_pinned = ReleasePinned,
      .make_stream = MakeStream,
      .destroy_stream = DestroyStream,
      .is_capturing = IsCapturing,
      .make_event = MakeEvent,
      .destroy_event = DestroyEvent,
      .record = Record,
      .wait = Wait,
      .query = Query,
      .copy = Copy,
      .call = Call,
      .encode = QueueLaunch<EncodeLaunch>,
      .decode = QueueLaunch<DecodeLaunch>,
      .accumulate = QueueLaunch<AccumulateLaunch>,
      .end_momentum = QueueLaunch<MomentumLaunch>,
      .reduce = QueueLaunch<ReduceLaunch>,
      .encode_entries = QueueLaunch<EncodeEntriesLaunch>,
      .add_entries = QueueLaunch<AddEntriesLaunch>,
      .identify = Identify,
      .reaches_peers = [](int, int* least) { return *least = 1, 0; },
      .run_on = RunOn,
  };
  return kApi;
}

}  // namespace thinwire::kernels
