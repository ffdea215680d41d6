// The memory that a chunk is worked on with besides its tensors: scratch, and on a device codecs
// with a room of their own. An algorithm itself says how much that is, by a rehearsal: it goes
// through all of its hops with codecs that do nothing.
//
//   ChunkMemory   how much it is, in bytes
//   Workspace     one chunk's
//   Workspaces    lends them to chunks, one after another
#ifndef THINWIRE_SCHEDULE_ENGINE_CHUNK_MEMORY_H_
#define THINWIRE_SCHEDULE_ENGINE_CHUNK_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
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

// Rehearses the job. Neither its tensors nor its kept memory is touched, but algorithms branch on
// which of those pointers are null.
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
  const std::unique_ptr<Backend> codecs_;  // null: the host's
  Scratch scratch_;
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
  struct Lent {
    std::unique_ptr<Workspace> workspace;
    Slab slab;                 // its memory on a device
    SlabPool* pool = nullptr;  // of that
  };
  Lent Take(const ChunkMemory& size, DeviceStream* stream);
  // `used`: the end of the work that was queued with it.
  void Give(Lent lent, std::shared_ptr<DeviceEvent> used);

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
  Lent TakeOnDevice(const ChunkMemory& size, DeviceStream& stream);

  std::optional<Pools> pools_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Workspace>> of_host_ ABSL_GUARDED_BY(mu_);
  int lanes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<OnLanes> on_lanes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_CHUNK_MEMORY_H_
