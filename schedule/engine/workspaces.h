// The memory that chunks use while they run:
//
//   ChunkMemory   how much memory a chunk takes besides its tensors, in bytes
//   Workspaces    lends a workspace to each chunk under way
#ifndef THINWIRE_SCHEDULE_ENGINE_WORKSPACES_H_
#define THINWIRE_SCHEDULE_ENGINE_WORKSPACES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/device.h"
#include "schedule/collective/algorithm.h"
#include "transport/planes.h"
#include "transport/staged/slab_pool.h"

namespace thinwire {

// On the host, where scratch grows as required, all sizes are zero.
struct ChunkMemory {
  size_t room = 0;     // of the device: for DeviceStream::BackendIn
  size_t scratch = 0;  // of the device
  size_t pinned = 0;   // of the host, for the largest exchange over a plane of host memory
  bool blocks_in_scratch = true;  // no exchange moves the tensors' own memory

  size_t on_device() const { return room + scratch; }

  static ChunkMemory Most(const ChunkMemory& a, const ChunkMemory& b);
  friend bool operator==(const ChunkMemory&, const ChunkMemory&) = default;
};

// Finds the memory of a chunk by a rehearsal: its algorithm goes through all of its hops with
// codecs that do nothing. Neither the job's tensors nor its kept memory is touched, but algorithms
// branch on which of those pointers are null.
ChunkMemory MemoryOf(const ChunkJob& job, const Membership& members, const Device& device);

// Workspaces lends a workspace to each chunk under way, and on a device reserves its memory. All
// workspaces are on the host, or all on one device. Thread-safe.
class Workspaces {
 public:
  // `device`: null for the host. `plane`: the group's data plane, of host or device memory; null in
  // a world of one. If it allocates memory, blocks lie in that. Both must outlive this object, and
  // this object must outlive all work in workspaces and all planes from PlaneOn.
  Workspaces(Device* device, DataPlane* plane, std::chrono::milliseconds patience);

  // For making lanes: the group's plane, the device, and how long a wait for a stream may take.
  DataPlane& plane() { return *plane_; }
  Device* device() const { return device_; }
  std::chrono::milliseconds patience() const { return patience_; }
  // The plane for blocks in the stream's memory: the group's own, if it is a StreamPlane, or a
  // staged one over the group's, by way of pinned memory. Fails if the device does.
  absl::StatusOr<std::unique_ptr<DataPlane>> PlaneOn(DeviceStream& stream);

  // On a device: allocates memory for `user`, which takes one workspace of this size at a time;
  // also pinned memory for its exchanges if the plane moves host memory. While every user takes
  // only what it has reserved, Take allocates no device memory. ResourceExhausted.
  absl::Status Reserve(uint64_t user, const ChunkMemory& size);
  // Reserves the same for each chunk that may be under way. SetAtOnce sets their number, which is 0
  // at first and never falls; a larger number reserves all earlier sizes for the added chunks.
  absl::Status ReserveForAll(const ChunkMemory& size);
  absl::Status SetAtOnce(int chunks);

  // A workspace for work that is queued on the stream from now on; null: on the host.
  std::unique_ptr<Workspace> Take(const ChunkMemory& size, DeviceStream* stream);
  // Returns a workspace. `used`: the end of the work that was queued with it.
  void Give(std::unique_ptr<Workspace> lent, std::shared_ptr<DeviceEvent> used);

 private:
  struct Pools {
    Pools(Device& device, DataPlane* plane);
    SlabPool on_device, pinned;
    std::optional<SlabPool> of_plane;
  };

  SlabPool& PoolFor(const ChunkMemory& size);
  absl::Status ReserveFrom(int first, int chunks, std::span<const ChunkMemory> reserved);
  std::unique_ptr<Workspace> TakeOnDevice(const ChunkMemory& size, DeviceStream& stream);

  Device* const device_;
  DataPlane* const plane_;
  const Membership members_;
  const std::chrono::milliseconds patience_;
  std::optional<Pools> pools_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Workspace>> of_host_ ABSL_GUARDED_BY(mu_);
  int at_once_ ABSL_GUARDED_BY(mu_) = 0;  // chunks
  std::vector<ChunkMemory> for_all_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_WORKSPACES_H_
