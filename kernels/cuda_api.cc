// The DeviceApi of NVIDIA GPUs, which libthinwire_cuda.so exports.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>

#include "compress/device.h"
#include "kernels/cuda_contexts.h"
#include "kernels/cuda_launch.h"
#include "kernels/device_api.h"

namespace thinwire::kernels {
namespace {

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventOf(void* event) { return static_cast<cudaEvent_t>(event); }

// Makes a device the thread's current one for a scope. Within it, captures by other threads of the
// process, in any mode, do not forbid this thread's calls.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) : current_(DriverContextCalls(), ordinal) {
    if (current_.error() == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~OnDevice() {
    if (current_.error() == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  template <typename Call>
  int Do(Call call) const {
    return current_.error() == cudaSuccess ? call() : current_.error();
  }

 private:
  const CurrentDevice current_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

const char* ErrorText(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int DeviceCount(int* count) { return cudaGetDeviceCount(count); }
int DriverVersion(int* version) { return cudaDriverGetVersion(version); }

// On a thread without a device the query itself would create a context on device 0.
int DeviceOf(int ordinal, const void* address, int* holder) {
  *holder = -1;
  return OnDevice(ordinal).Do([&] {
    cudaPointerAttributes attributes;
    const cudaError_t error = cudaPointerGetAttributes(&attributes, address);
    if (error == cudaErrorInvalidValue) {
      cudaGetLastError();  // the driver does not know the address: host memory
      return cudaSuccess;
    }
    const bool here =
        attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    if (error == cudaSuccess && here) *holder = attributes.device;
    return error;
  });
}

int Identify(int ordinal, char text[kIdentityBytes]) {
  // Parts of one GPU (MIG) share its bus address, but not the identifier.
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) return error;
  char* end = text;
  for (const char byte : properties.uuid.bytes) {
    end += std::snprintf(end, 3, "%02x", static_cast<unsigned char>(byte));
  }
  return cudaSuccess;
}

// NVLink supports atomic operations, PCIe does not.
cudaError_t ReachOf(int ordinal, int other, int* reach) {
  int access = 0, atomics = 0;
  const cudaError_t error = cudaDeviceCanAccessPeer(&access, ordinal, other);
  *reach = static_cast<int>(PeerReach::kHostMemory);
  if (error != cudaSuccess || access == 0) return error;
  *reach = static_cast<int>(PeerReach::kBus);
  const cudaError_t unknown =
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, ordinal, other);
  if (unknown != cudaSuccess) cudaGetLastError();
  if (unknown == cudaSuccess && atomics != 0) *reach = static_cast<int>(PeerReach::kLink);
  return cudaSuccess;
}

int ReachesPeers(int ordinal, int* least) {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  *least = static_cast<int>(devices > 1 ? PeerReach::kLink : PeerReach::kBus);
  for (int other = 0; error == cudaSuccess && other < devices; ++other) {
    if (other == ordinal) continue;
    int reach = 0;
    error = ReachOf(ordinal, other, &reach);
    *least = std::min(*least, reach);
  }
  return error;
}

int RunOn(int ordinal, void (*work)(void*), void* argument) {
  return OnDevice(ordinal).Do([&] {
    work(argument);
    return cudaSuccess;
  });
}

int Allocate(int ordinal, size_t bytes, void** memory) {
  return OnDevice(ordinal).Do([&] {
    const cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaErrorMemoryAllocation) cudaGetLastError();  // a refusal, not a broken device
    return error;
  });
}
int Release(int ordinal, void* memory) {
  return OnDevice(ordinal).Do([&] { return cudaFree(memory); });
}
int AllocatePinned(int ordinal, size_t bytes, void** memory) {
  return OnDevice(ordinal).Do([&] {
    const cudaError_t error = cudaHostAlloc(memory, bytes, cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) cudaGetLastError();
    return error;
  });
}
int ReleasePinned(int ordinal, void* memory) {
  return OnDevice(ordinal).Do([&] { return cudaFreeHost(memory); });
}

// Streams do not wait for the default stream: work that a caller queued there is awaited by event.
// Their kernels have priority over those of the caller's backward pass, which fill the device for
// longer than a codec takes; peers wait for the codec.
int MakeStream(int ordinal, void** stream) {
  return OnDevice(ordinal).Do([&] {
    int least = 0, greatest = 0;
    const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error != cudaSuccess) return error;
    return cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream),
                                        cudaStreamNonBlocking, greatest);
  });
}
int DestroyStream(int ordinal, void* stream) {
  return OnDevice(ordinal).Do([&] { return cudaStreamDestroy(StreamOf(stream)); });
}

// The legacy default stream is never captured, but may not be used while another one is.
int IsCapturing(int ordinal, void* stream, int* capturing) {
  return OnDevice(ordinal).Do([&] {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(StreamOf(stream), &status);
    const bool implicit = error == cudaErrorStreamCaptureImplicit;
    if (implicit) error = (cudaGetLastError(), cudaSuccess);
    *capturing = implicit || status != cudaStreamCaptureStatusNone;
    return error;
  });
}

int MakeEvent(int ordinal, void** event) {
  return OnDevice(ordinal).Do([&] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
  });
}
int DestroyEvent(int ordinal, void* event) {
  return OnDevice(ordinal).Do([&] { return cudaEventDestroy(EventOf(event)); });
}

int Record(int ordinal, void* event, void* stream) {
  return OnDevice(ordinal).Do([&] { return cudaEventRecord(EventOf(event), StreamOf(stream)); });
}
int Wait(int ordinal, void* stream, void* event) {
  return OnDevice(ordinal).Do(
      [&] { return cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0); });
}
int Query(int ordinal, void* event) {
  return OnDevice(ordinal).Do([&]() -> int {
    const cudaError_t error = cudaEventQuery(EventOf(event));
    if (error != cudaErrorNotReady) return error;
    cudaGetLastError();  // an answer, not an error: the next launch must not report it
    return kBusy;
  });
}

int Copy(int ordinal, void* to, const void* from, size_t bytes, void* stream) {
  return OnDevice(ordinal).Do(
      [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, StreamOf(stream)); });
}

int Call(int ordinal, void (*function)(void*), void* argument, void* stream) {
  return OnDevice(ordinal).Do(
      [&] { return cudaLaunchHostFunc(StreamOf(stream), function, argument); });
}

int Encode(int ordinal, const EncodeLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchEncode(*launch, StreamOf(stream)); });
}
int Decode(int ordinal, const DecodeLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchDecode(*launch, StreamOf(stream)); });
}
int Accumulate(int ordinal, const AccumulateLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchAccumulate(*launch, StreamOf(stream)); });
}
int EndMomentum(int ordinal, const MomentumLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchEndMomentum(*launch, StreamOf(stream)); });
}
int Reduce(int ordinal, const ReduceLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchReduce(*launch, StreamOf(stream)); });
}
int EncodeEntries(int ordinal, const EncodeEntriesLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchEncodeEntries(*launch, StreamOf(stream)); });
}
int AddEntries(int ordinal, const AddEntriesLaunch* launch, void* stream) {
  return OnDevice(ordinal).Do([&] { return LaunchAddEntries(*launch, StreamOf(stream)); });
}

constexpr DeviceApi kApi = {
    .version = kDeviceApiVersion,
    .runtime_version = CUDART_VERSION,
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
    .encode = Encode,
    .decode = Decode,
    .accumulate = Accumulate,
    .end_momentum = EndMomentum,
    .reduce = Reduce,
    .encode_entries = EncodeEntries,
    .add_entries = AddEntries,
    .identify = Identify,
    .reaches_peers = ReachesPeers,
    .run_on = RunOn,
};

}  // namespace
}  // namespace thinwire::kernels

extern "C" __attribute__((visibility("default"))) const thinwire::kernels::DeviceApi*
tw_cuda_api() {
  return &thinwire::kernels::kApi;
}
