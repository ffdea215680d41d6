// A device made of CPU threads, for tests and nccl_bench: the same jobs and tiles as a GPU (run by
// HostTeam), streams that run asynchronously, and memory that only its address distinguishes from
// the host's.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_

#include <functional>

#include "kernels/device_api.h"

namespace thinwire::kernels {

// Devices 0 to kHostDevices - 1 share nothing, so each rank can have one.
inline constexpr int kHostDevices = 8;
const DeviceApi& HostDeviceApi();

// Queues any work on a stream, like a caller's own kernel. A null stream is device 0's default one.
void QueueOnHostDevice(void* stream, std::function<void()> work);

// Run a launch at once on the calling thread.
void RunOnHost(const EncodeLaunch& launch);
void RunOnHost(const DecodeLaunch& launch);
void RunOnHost(const AccumulateLaunch& launch);
void RunOnHost(const MomentumLaunch& launch);
void RunOnHost(const ReduceLaunch& launch);
void RunOnHost(const EncodeEntriesLaunch& launch);
void RunOnHost(const AddEntriesLaunch& launch);

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_
