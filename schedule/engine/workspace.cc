#include "schedule/engine/workspace.h"

namespace thinwire {

Workspaces::Workspaces(Device* device) {
  if (device != nullptr) pools_.emplace(*device);
}

absl::Status Workspaces::Reserve(uint64_t user, const Needs& needs, bool over_pinned) {
  absl::Status status = pools_->on_device.Reserve(user, needs.on_device());
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
  if (needs.on_device() > 0) {
    absl::StatusOr<Slab> taken = pools_->on_device.Take(needs.on_device());
    if (!taken.ok()) return {std::make_unique<Workspace>(taken.status(), stream), {}};
    slab = *std::move(taken);
  }
  stream.WaitFor(slab.used);
  const MutableBytes memory(slab.memory.get(), needs.on_device());
  return {std::make_unique<Workspace>(memory, needs, stream), std::move(slab)};
}

void Workspaces::Give(Lent lent, std::shared_ptr<DeviceEvent> used) {
  if (pools_.has_value()) {
    lent.workspace.reset();
    lent.slab.used = std::move(used);
    return pools_->on_device.Give(std::move(lent.slab));
  }
  const absl::MutexLock lock(&mu_);
  of_host_.push_back(std::move(lent.workspace));
}

}  // namespace thinwire
