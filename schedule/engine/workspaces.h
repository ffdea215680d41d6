// The memory that chunks are run in:
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

// All zero on the host, which has no need to know.
struct ChunkMemory {
  size_t room = 0;     // of the device: DeviceStream::BackendIn's
  size_t scratch = 0;  // of the device
  size_t pinned = 0;   // of the host, for the largest exchange over a plane of host memory
  bool blocks_in_scratch = true;  // no exchange moves the tensors' own memory

  size_t on_device() const { return room + scratch; }

  static ChunkMemory Most(const ChunkMemory& a, const ChunkMemory& b);
  friend bool operator==(const ChunkMemory&, const ChunkMemory&) = default;
};

// An algorithm says itself how much memory it takes, by a rehearsal: it goes through all of its
// hops with codecs that do nothing. Neither its tensors nor its kept memory is touched, but
// algorithms branch on which of those pointers are null.
ChunkMemory MemoryOf(const ChunkJob& job, const Membership& members, const Device& device);

// Workspaces lends a workspace to each chunk under way, and on a device reserves its memory. All
// are of the host, or all of one device. Thread-safe.
class Workspaces {
 public:
  // The device is null for the host. `plane` is the group's data plane, whosever memory its blocks
  // are, and blocks lie in its own memory where it has some; null in a world of one. Both outlive
  // this, as this does all work in workspaces and all planes of streams.
  Workspaces(Device* device, DataPlane* plane, std::chrono::milliseconds patience);

  // Lanes are made with these: the group's plane, and how long a wait for a stream may take.
  DataPlane& plane() { return *plane_; }
  Device* device() const { return device_; }
  std::chrono::milliseconds patience() const { return patience_; }
  // The plane for blocks in memory of the stream: its own, or one over the host's by way of pinned
  // memory. Fails with the device.
  absl::StatusOr<std::unique_ptr<DataPlane>> PlaneOn(DeviceStream& stream);

  // On a device: allocates the memory for a user who takes a workspace of this size, one at a time,
  // and exchanges blocks over pinned memory where the plane is of the host. As long as nobody takes
  // what it has not reserved, Take allocates nothing of the device. ResourceExhausted.
  absl::Status Reserve(uint64_t user, const ChunkMemory& size);
  // The same for each of the chunks that may be under way, whose number is 0 at first and never
  // falls: what is reserved for them is also reserved for those that come later.
  absl::Status ReserveForAll(const ChunkMemory& size);
  absl::Status SetAtOnce(int chunks);

  // A workspace for work that is queued on the stream from here on; null: on the host.
  std::unique_ptr<Workspace> Take(const ChunkMemory& size, DeviceStream* stream);
  // `used`: the end of the work that was queued with it.
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
