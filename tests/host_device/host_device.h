// A device made of CPU threads, for tests and nccl_bench: the same jobs, the same tiles (by
// HostTeam), streams that really run behind the host's back, and memory that is told apart from the
// host's by its address alone.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_

#include <functional>

#include "kernels/device_api.h"

namespace thinwire::kernels {

// Devices 0 to kHostDevices - 1, which share nothing, so that each can be one rank's own.
inline constexpr int kHostDevices = 8;
const DeviceApi& HostDeviceApi();

// Queues any work on a stream, as a caller's own kernels would be; null is device 0's default one.
void QueueOnHostDevice(void* stream, std::function<void()> work);

// The launches, run at once on the calling thread.
void RunOnHost(const EncodeLaunch& launch);
void RunOnHost(const DecodeLaunch& launch);
void RunOnHost(const AccumulateLaunch& launch);
void RunOnHost(const MomentumLaunch& launch);
void RunOnHost(const ReduceLaunch& launch);
void RunOnHost(const EncodeEntriesLaunch& launch);
void RunOnHost(const AddEntriesLaunch& launch);

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_DEVICE_H_
