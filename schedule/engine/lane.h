// The means that chunks are run with, which are all of the host, or all of one device:
//
//   ChunkMemory   how much memory a chunk takes besides its tensors, in bytes
//   Workspace     one chunk's: scratch, and on a device codecs with a room of their own
//   Lane          the means of one chunk at a time: a data plane, and on a device a stream
//   Lanes         makes lanes, and lends workspaces to the chunks on them
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
  friend class Lanes;

  const std::unique_ptr<Backend> codecs_;  // null: the host's
  Scratch scratch_;
  Slab slab_;                 // the memory on a device, if Lanes took it
  SlabPool* pool_ = nullptr;  // of the slab
};

class Lane;

// Thread-safe.
class Lanes {
 public:
  // The device is null for the host. `plane` is the group's data plane, whosever memory its blocks
  // are, and blocks lie in its own memory where it has some; null in a world of one, which has
  // workspaces and no lanes. Both outlive this, as this does its lanes and all work in workspaces.
  Lanes(Device* device, DataPlane* plane, std::chrono::milliseconds patience);

  absl::StatusOr<std::unique_ptr<Lane>> Make(int slot);

  DataTraits traits() const { return plane_->traits(); }
  bool on_device() const { return device_ != nullptr; }

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
  friend class Lane;

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
  const std::chrono::milliseconds patience_;
  std::optional<Pools> pools_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Workspace>> of_host_ ABSL_GUARDED_BY(mu_);
  int at_once_ ABSL_GUARDED_BY(mu_) = 0;  // chunks
  std::vector<ChunkMemory> for_all_ ABSL_GUARDED_BY(mu_);
};

// One thread at a time uses it.
class Lane {
 public:
  DataPlane& plane() { return of_stream_ ? *of_stream_ : *lanes_.plane_; }
  // Its own in every fence.
  int slot() const { return slot_; }
  const Membership& members() const { return lanes_.plane_->members(); }

  // Enter makes the stream wait until the tensor is `ready`, and for earlier users of its memory,
  // which the fence knows, and of the workspace that it returns; Leave records in the fence when
  // this work ends, and gives the workspace back. Leave returns the status of it all: where that is
  // bad, the device no longer touches the tensor. On the host ready and fence are null.
  std::unique_ptr<Workspace> Enter(const std::shared_ptr<DeviceEvent>& ready, Fence* fence,
                                   const ChunkMemory& size);
  absl::Status Leave(Fence* fence, std::unique_ptr<Workspace> lent, absl::Status status);

 private:
  friend class Lanes;
  Lane(Lanes& lanes, int slot) : lanes_(lanes), slot_(slot) {}

  absl::Status AwaitStream(Fence& fence, const std::shared_ptr<DeviceEvent>& end,
                           absl::Status status);

  Lanes& lanes_;
  const int slot_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  std::unique_ptr<DataPlane> of_stream_;  // null: the host
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LANE_H_
