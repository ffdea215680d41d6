#include "schedule/engine/workspace.h"

namespace thinwire {

Workspaces::Pools::Pools(Device& device, DataPlane* plane)
    : on_device(device, SlabPool::Memory::kDevice), pinned(device, SlabPool::Memory::kPinned) {
  if (plane == nullptr || !plane->traits().allocates) return;
  of_plane.emplace([plane](size_t bytes) { return plane->Allocate(bytes); });
}

Workspaces::Workspaces(Device* device, DataPlane* plane) {
  if (device != nullptr) pools_.emplace(*device, plane);
}

// Blocks of the plane's own memory may not meet any others: a chunk that sends or receives tensors
// as they are has none at all.
SlabPool& Workspaces::PoolFor(const Needs& needs) {
  const bool of_plane = pools_->of_plane.has_value() && needs.blocks_in_scratch;
  return of_plane ? *pools_->of_plane : pools_->on_device;
}

absl::Status Workspaces::Reserve(uint64_t user, const Needs& needs, bool over_pinned) {
  absl::Status status = PoolFor(needs).Reserve(user, needs.on_device());
  if (!status.ok() || !over_pinned) return status;
  return pools_->pinned.Reserve(user, needs.pinned);
}

Workspaces::Lent Workspaces::Take(const Needs& needs, DeviceStream* stream) {
  if (stream != nullptr) return TakeOnDevice(needs, *stream);
  {
    const absl::MutexLock lock(&mu_);
    if (!of_host_.empty()) {
      Lent lent{std::move(of_host_.back()), {}};
      of_host_.pop_back();
      return lent;
    }
  }
  return {std::make_unique<Workspace>(), {}};
}

Workspaces::Lent Workspaces::TakeOnDevice(const Needs& needs, DeviceStream& stream) {
  Slab slab;
  SlabPool& pool = PoolFor(needs);
  if (needs.on_device() > 0) {
    absl::StatusOr<Slab> taken = pool.Take(needs.on_device());
    if (!taken.ok()) return {std::make_unique<Workspace>(taken.status(), stream), {}};
    slab = *std::move(taken);
  }
  stream.WaitFor(slab.used);
  const MutableBytes memory(slab.memory.get(), needs.on_device());
  return {std::make_unique<Workspace>(memory, needs, stream), std::move(slab), &pool};
}

void Workspaces::Give(Lent lent, std::shared_ptr<DeviceEvent> used) {
  if (pools_.has_value()) {
    lent.workspace.reset();
    lent.slab.used = std::move(used);
    if (lent.pool != nullptr) lent.pool->Give(std::move(lent.slab));
    return;
  }
  const absl::MutexLock lock(&mu_);
  of_host_.push_back(std::move(lent.workspace));
}

}  // namespace thinwire
