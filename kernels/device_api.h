// DeviceApi: all that the host needs of a device, as a table of plain functions. For a GPU it comes
// from libthinwire_cuda.so (cuda_api.cc), which is loaded on demand; tests/host_device has a device
// made of CPU threads.
//
// Functions return 0, or an error number that `error_text` explains; none throws. A stream is a
// cudaStream_t, an event a cudaEvent_t, as void*; a null stream is the device's default one. All
// are thread-safe, and each call names its device by `ordinal`: the calling thread need not have
// chosen a device, and its choice is unchanged afterwards.
#ifndef THINWIRE_KERNELS_DEVICE_API_H_
#define THINWIRE_KERNELS_DEVICE_API_H_

#include <cstddef>
#include <cstdint>

#include "kernels/entry_jobs.h"

namespace thinwire::kernels {

// Increment it whenever the table or a job changes: a library of another version is refused.
inline constexpr uint32_t kDeviceApiVersion = 13;

// The result of `query` while the work before the event is not done.
inline constexpr int kBusy = -1;

// CUDA's error number for a driver that is missing, or older than the library's runtime requires.
inline constexpr int kInsufficientDriver = 35;

// The size of the text that `identify` writes.
inline constexpr size_t kIdentityBytes = 64;

struct DeviceApi {
  uint32_t version;

  // The version of the CUDA runtime in the library, such as 13000 for 13.0.
  int runtime_version;

  const char* (*error_text)(int error);
  int (*device_count)(int* count);
  // The newest CUDA version that the driver supports; 0: there is no driver.
  int (*driver_version)(int* version);
  // The ordinal of the device that holds an address, whatever `ordinal` is; -1: the host.
  int (*device_of)(int ordinal, const void* address, int* holder);

  int (*allocate)(int ordinal, size_t bytes, void** memory);
  int (*release)(int ordinal, void* memory);
  int (*allocate_pinned)(int ordinal, size_t bytes, void** memory);  // host memory
  int (*release_pinned)(int ordinal, void* memory);

  int (*make_stream)(int ordinal, void** stream);
  int (*destroy_stream)(int ordinal, void* stream);
  // 1 if work queued on the stream is being captured in a graph, else 0.
  int (*is_capturing)(int ordinal, void* stream, int* capturing);
  int (*make_event)(int ordinal, void** event);
  int (*destroy_event)(int ordinal, void* event);

  // No function from here to add_entries makes the host wait; all but `query` queue work on a
  // stream. A launch of no tiles runs nothing but loads its kernels' code.
  int (*record)(int ordinal, void* event, void* stream);
  int (*wait)(int ordinal, void* stream, void* event);  // the stream waits
  int (*query)(int ordinal, void* event);               // kBusy: not yet reached
  // Copies between any two memories.
  int (*copy)(int ordinal, void* to, const void* from, size_t bytes, void* stream);
  // `function(argument)` runs on a thread of the driver, and must neither wait nor call the device.
  // After a failure of the device it never runs.
  int (*call)(int ordinal, void (*function)(void* argument), void* argument, void* stream);

  int (*encode)(int ordinal, const EncodeLaunch* launch, void* stream);
  int (*decode)(int ordinal, const DecodeLaunch* launch, void* stream);
  int (*accumulate)(int ordinal, const AccumulateLaunch* launch, void* stream);
  int (*end_momentum)(int ordinal, const MomentumLaunch* launch, void* stream);
  int (*reduce)(int ordinal, const ReduceLaunch* launch, void* stream);
  int (*encode_entries)(int ordinal, const EncodeEntriesLaunch* launch, void* stream);
  int (*add_entries)(int ordinal, const AddEntriesLaunch* launch, void* stream);

  // The calls below are synchronous.

  // Writes a text that is unique among the devices of the host, terminated by a zero.
  int (*identify)(int ordinal, char text[kIdentityBytes]);
  // The PeerReach (compress/device.h) to the device that is hardest to reach.
  int (*reaches_peers)(int ordinal, int* least);
  // Calls `work(argument)` with the device as the thread's current one.
  int (*run_on)(int ordinal, void (*work)(void* argument), void* argument);
};

// The exported name of the function `const DeviceApi* ()` of libthinwire_cuda.so.
inline constexpr char kDeviceApiSymbol[] = "tw_cuda_api";

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_DEVICE_API_H_
