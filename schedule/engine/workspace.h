// Workspace: what a chunk is worked on with besides its tensors: scratch, and on a device codecs
// with a room of their own. Workspaces: those of many chunks, which go from one to the next.
#ifndef THINWIRE_SCHEDULE_ENGINE_WORKSPACE_H_
#define THINWIRE_SCHEDULE_ENGINE_WORKSPACE_H_

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "compress/backend.h"
#include "compress/device.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/needs.h"
#include "transport/data_plane.h"
#include "transport/staged/slab_pool.h"

namespace thinwire {

class Workspace {
 public:
  Workspace() = default;  // of the host
  // Of needs.on_device() bytes, for work of the stream.
  Workspace(MutableBytes memory, const Needs& needs, DeviceStream& stream)
      : codecs_(stream.BackendIn(memory.first(needs.room))), scratch_(memory.subspan(needs.room)) {}
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
  // Of a device, which outlives this, as this all work in them; null: of the host. `plane` may be
  // null; else it outlives this, and blocks lie in its own memory where it has some.
  Workspaces(Device* device, DataPlane* plane);

  // On a device: allocates the memory for a user who takes one of these needs, one at a time, and
  // exchanges blocks over pinned memory if so asked. As long as nobody takes what it has not
  // reserved, Take allocates nothing of the device. ResourceExhausted.
  absl::Status Reserve(uint64_t user, const Needs& needs, bool over_pinned);

  // One for work that is queued on the stream from here on; null: on the host.
  struct Lent {
    std::unique_ptr<Workspace> workspace;
    Slab slab;                 // its memory on a device
    SlabPool* pool = nullptr;  // of that
  };
  Lent Take(const Needs& needs, DeviceStream* stream);
  // `used`: the end of the work that was queued with it.
  void Give(Lent lent, std::shared_ptr<DeviceEvent> used);

  SlabPool& pinned() { return pools_->pinned; }  // of a device only

 private:
  struct Pools {
    Pools(Device& device, DataPlane* plane);
    SlabPool on_device, pinned;
    std::optional<SlabPool> of_plane;
  };

  SlabPool& PoolFor(const Needs& needs);
  Lent TakeOnDevice(const Needs& needs, DeviceStream& stream);

  std::optional<Pools> pools_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Workspace>> of_host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_WORKSPACE_H_
