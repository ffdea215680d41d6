// The device of CPU threads, with counts of the calls that it gets.
#ifndef THINWIRE_TESTS_KERNELS_WATCHED_DEVICE_H_
#define THINWIRE_TESTS_KERNELS_WATCHED_DEVICE_H_

#include <atomic>
#include <compare>
#include <memory>
#include <set>
#include <string>

#include "absl/synchronization/mutex.h"
#include "kernels/device.h"
#include "kernels/reduce_parts.h"
#include "tests/host_device/host_device.h"

namespace thinwire {

// Counts over all watched devices of the process.
struct DeviceCounts {
  std::atomic<int> allocated = 0, pinned = 0;  // pieces of memory
  std::atomic<int> pooled = 0;                 // launches that need a room but have none
  std::atomic<int> queries = 0;
  std::atomic<int> copies_queued = 0, copies = 0;  // queued, and done
  std::atomic<int> cold = 0;  // launches of kernels whose code was not loaded before
};
inline DeviceCounts device_counts;

// The values that select the kernels of a launch.
struct KernelKey {
  int entry;
  CodecId up{}, down{};
  DType dtype{};
  bool add = false;
  friend auto operator<=>(const KernelKey&, const KernelKey&) = default;
};

// Counts the launches with tiles whose kernels' code was not loaded before.
inline void CountCold(const KernelKey& key, uint32_t tiles) {
  static absl::Mutex mu;
  static std::set<KernelKey> loaded;
  const absl::MutexLock lock(&mu);
  if (tiles == 0) {
    loaded.insert(key);
  } else if (!loaded.contains(key)) {
    ++device_counts.cold;
  }
}

inline bool HasNoRoom(const uint8_t* room) { return room == nullptr; }
inline bool HasNoRoom(const kernels::EntryRoom& room) { return room.state == nullptr; }

template <typename Launch>
void CountPooled(const Launch& launch) {
  if (HasNoRoom(launch.room) && RoomOf(launch) > 0) ++device_counts.pooled;
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
      CountCold({0, launch->codec.id, {}, launch->dtype}, launch->jobs.tiles);
      return kernels::HostDeviceApi().encode(ordinal, launch, stream);
    };
    api.decode = [](int ordinal, const kernels::DecodeLaunch* launch, void* stream) {
      CountPooled(*launch);
      CountCold({1, launch->codec.id, {}, launch->dtype, launch->add}, launch->jobs.tiles);
      return kernels::HostDeviceApi().decode(ordinal, launch, stream);
    };
    api.reduce = [](int ordinal, const kernels::ReduceLaunch* launch, void* stream) {
      CountPooled(*launch);
      CountCold({2, launch->up.id, launch->down.id, launch->dtype}, launch->tiles);
      return kernels::HostDeviceApi().reduce(ordinal, launch, stream);
    };
    api.accumulate = [](int ordinal, const kernels::AccumulateLaunch* launch, void* stream) {
      CountCold({.entry = 3, .dtype = launch->dtype}, launch->jobs.tiles);
      return kernels::HostDeviceApi().accumulate(ordinal, launch, stream);
    };
    api.end_momentum = [](int ordinal, const kernels::MomentumLaunch* launch, void* stream) {
      CountCold({.entry = 4}, launch->jobs.tiles);
      return kernels::HostDeviceApi().end_momentum(ordinal, launch, stream);
    };
    api.encode_entries = [](int ordinal, const kernels::EncodeEntriesLaunch* launch, void* stream) {
      CountPooled(*launch);
      CountCold({.entry = 5}, launch->tiles);
      return kernels::HostDeviceApi().encode_entries(ordinal, launch, stream);
    };
    api.add_entries = [](int ordinal, const kernels::AddEntriesLaunch* launch, void* stream) {
      CountCold({.entry = 6}, launch->tiles);
      return kernels::HostDeviceApi().add_entries(ordinal, launch, stream);
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
