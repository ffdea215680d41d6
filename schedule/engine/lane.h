// The means that chunks are run with, which are all of the host, or all of one device:
//
//   ChunkMemory   how much memory a chunk takes besides its tensors, in bytes
//   Workspace     one chunk's: scratch, and on a device codecs with a room of their own
//   Workspaces    lends them to chunks, one after another
//   Lane          the means of one chunk at a time: a data plane, and on a device a stream
//   Lanes         makes lanes
#ifndef THINWIRE_SCHEDULE_ENGINE_LANE_H_
#define THINWIRE_SCHEDULE_ENGINE_LANE_H_

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
#include "compress/backend.h"
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

class Workspace {
 public:
  Workspace() = default;  // of the host
  // `memory` has size.on_device() bytes, for work of the stream.
  Workspace(MutableBytes memory, const ChunkMemory& size, DeviceStream& stream)
      : codecs_(stream.BackendIn(memory.first(size.room))), scratch_(memory.subspan(size.room)) {}
  // A device has no memory left: whoever takes scratch finds that status there.
  Workspace(absl::Status reason, DeviceStream& stream)
      : codecs_(stream.BackendIn({})), scratch_(std::move(reason)) {}

  Bench bench(const Membership& members) {
    return {codecs_ == nullptr ? CpuBackend() : *codecs_, scratch_, members};
  }

 private:
  friend class Workspaces;

  const std::unique_ptr<Backend> codecs_;  // null: the host's
  Scratch scratch_;
  Slab slab_;                 // the memory on a device, if Workspaces took it
  SlabPool* pool_ = nullptr;  // of the slab
};

// Thread-safe.
class Workspaces {
 public:
  // `device` outlives this, as this does all work in them; null: the host. `plane` may be
  // null; else it outlives this, and blocks lie in its own memory where it has some.
  Workspaces(Device* device, DataPlane* plane);

  // On a device: allocates the memory for a user who takes one of this size, one at a time, and
  // exchanges blocks over pinned memory if so asked. As long as nobody takes what it has not
  // reserved, Take allocates nothing of the device. ResourceExhausted.
  absl::Status Reserve(uint64_t user, const ChunkMemory& size, bool over_pinned);
  // The same for each of the lanes, whose number is 0 at first and never falls: what is reserved
  // on them is also reserved on those that come later.
  absl::Status ReserveOnLanes(const ChunkMemory& size, bool over_pinned);
  absl::Status SetLanes(int lanes);

  // One for work that is queued on the stream from here on; null: on the host.
  std::unique_ptr<Workspace> Take(const ChunkMemory& size, DeviceStream* stream);
  // `used`: the end of the work that was queued with it.
  void Give(std::unique_ptr<Workspace> lent, std::shared_ptr<DeviceEvent> used);

  SlabPool& pinned() { return pools_->pinned; }  // of a device only

 private:
  struct Pools {
    Pools(Device& device, DataPlane* plane);
    SlabPool on_device, pinned;
    std::optional<SlabPool> of_plane;
  };

  struct OnLanes {
    ChunkMemory size;
    bool over_pinned = false;
    friend bool operator==(const OnLanes&, const OnLanes&) = default;
  };

  SlabPool& PoolFor(const ChunkMemory& size);
  absl::Status ReserveFrom(int first, int lanes, std::span<const OnLanes> reserved);
  std::unique_ptr<Workspace> TakeOnDevice(const ChunkMemory& size, DeviceStream& stream);

  std::optional<Pools> pools_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Workspace>> of_host_ ABSL_GUARDED_BY(mu_);
  int lanes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<OnLanes> on_lanes_ ABSL_GUARDED_BY(mu_);
};

// When a tensor on a device may be touched, and when it is done. Null members on the host.
struct DeviceOrder {
  std::shared_ptr<DeviceEvent> ready;  // the caller's work on the input
  std::shared_ptr<Fence> fence;        // the engine's work on input, output, residual and momentum
};

// One thread at a time uses it.
class Lane {
 public:
  DataPlane& plane() { return of_stream_ ? *of_stream_ : group_; }
  // Its own in every fence.
  int slot() const { return slot_; }
  const Membership& members() const { return group_.members(); }

  // Enter makes the stream wait for the caller's input and for earlier users of this memory, and of
  // the workspace that it returns; Leave records when this work ends, and gives that back. Leave
  // returns the status of it all: where that is bad, the device no longer touches the tensor.
  std::unique_ptr<Workspace> Enter(const DeviceOrder& order, const ChunkMemory& size);
  absl::Status Leave(const DeviceOrder& order, std::unique_ptr<Workspace> lent,
                     absl::Status status);

 private:
  friend class Lanes;
  Lane(Workspaces& spaces, DataPlane& group, int slot, std::chrono::milliseconds patience)
      : spaces_(spaces), group_(group), slot_(slot), patience_(patience) {}

  absl::Status AwaitStream(const DeviceOrder& order, const std::shared_ptr<DeviceEvent>& end,
                           absl::Status status);

  Workspaces& spaces_;
  DataPlane& group_;
  const int slot_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  std::unique_ptr<DataPlane> of_stream_;  // null: the host
};

// Thread-safe.
class Lanes {
 public:
  // The device is null for the host. `plane` is the group's data plane, whosever memory its blocks
  // are; null in a world of one, which has workspaces and no lanes. Both outlive this, as this does
  // the lanes.
  Lanes(Device* device, DataPlane* plane, std::chrono::milliseconds patience)
      : device_(device), plane_(plane), patience_(patience), spaces_(device, plane) {}

  absl::StatusOr<std::unique_ptr<Lane>> Make(int slot);

  DataTraits traits() const { return plane_->traits(); }
  Workspaces& spaces() { return spaces_; }

 private:
  Device* const device_;
  DataPlane* const plane_;
  const std::chrono::milliseconds patience_;
  Workspaces spaces_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LANE_H_
