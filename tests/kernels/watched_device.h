// The device of CPU threads, with counts of what is asked of it.
#ifndef THINWIRE_TESTS_KERNELS_WATCHED_DEVICE_H_
#define THINWIRE_TESTS_KERNELS_WATCHED_DEVICE_H_

#include <atomic>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "kernels/reduce_parts.h"
#include "tests/host_device/host_device.h"

namespace thinwire {

// Counts over all watched devices of the program.
struct DeviceCounts {
  std::atomic<int> allocated = 0, pinned = 0;  // pieces of memory
  std::atomic<int> pooled = 0;                 // launches that need a room and have none
  std::atomic<int> queries = 0;
  std::atomic<int> copies_queued = 0, copies = 0;  // the latter are done
};
inline DeviceCounts device_counts;

template <typename Launch>
void CountPooled(const Launch& launch) {
  if (launch.room == nullptr && RoomOf(launch) > 0) ++device_counts.pooled;
}

inline const kernels::DeviceApi& WatchedDeviceApi() {
  static const kernels::DeviceApi watched = [] {
    kernels::DeviceApi api = kernels::HostDeviceApi();
    api.allocate = [](int ordinal, size_t bytes, void** memory) {
      ++device_counts.allocated;
      return kernels::HostDeviceApi().allocate(ordinal, bytes, memory);
    };
    api.allocate_pinned = [](int ordinal, size_t bytes, void** memory) {
      ++device_counts.pinned;
      return kernels::HostDeviceApi().allocate_pinned(ordinal, bytes, memory);
    };
    api.query = [](int ordinal, void* event) {
      ++device_counts.queries;
      return kernels::HostDeviceApi().query(ordinal, event);
    };
    api.encode = [](int ordinal, const kernels::EncodeLaunch* launch, void* stream) {
      CountPooled(*launch);
      return kernels::HostDeviceApi().encode(ordinal, launch, stream);
    };
    api.decode = [](int ordinal, const kernels::DecodeLaunch* launch, void* stream) {
      CountPooled(*launch);
      return kernels::HostDeviceApi().decode(ordinal, launch, stream);
    };
    api.reduce = [](int ordinal, const kernels::ReduceLaunch* launch, void* stream) {
      CountPooled(*launch);
      return kernels::HostDeviceApi().reduce(ordinal, launch, stream);
    };
    api.copy = [](int ordinal, void* to, const void* from, size_t bytes, void* stream) {
      const int error = kernels::HostDeviceApi().copy(ordinal, to, from, bytes, stream);
      ++device_counts.copies_queued;
      kernels::QueueOnHostDevice(stream, [] { ++device_counts.copies; });
      return error;
    };
    return api;
  }();
  return watched;
}

inline std::shared_ptr<Device> WatchedDevice(int ordinal = 0) {
  return MakeDevice(WatchedDeviceApi(), ordinal, "watched:" + std::to_string(ordinal));
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_KERNELS_WATCHED_DEVICE_H_
