#include "transport/staged/slab_pool.h"

#include <algorithm>
#include <bit>

namespace thinwire {
namespace {

constexpr size_t kSmallest = 4096;  // bytes

size_t SizeOf(size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallest)); }

}  // namespace

SlabPool::SlabPool(Device& device, Memory memory)
    : SlabPool([&device, memory](size_t bytes) {
        return memory == Memory::kDevice ? device.Allocate(bytes) : device.AllocatePinned(bytes);
      }) {}

absl::Status SlabPool::Reserve(uint64_t user, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const Reservation reservation(user, SizeOf(bytes));
  {
    const absl::MutexLock lock(&mu_);
    if (!reserved_.insert(reservation).second) return absl::OkStatus();
  }
  absl::StatusOr<Slab> slab = Make(reservation.second);
  const absl::MutexLock lock(&mu_);
  if (slab.ok()) {
    free_.push_back(*std::move(slab));
  } else {
    reserved_.erase(reservation);
  }
  return slab.status();
}

absl::StatusOr<Slab> SlabPool::Take(size_t bytes) {
  {
    const absl::MutexLock lock(&mu_);
    auto best = free_.end();
    for (auto slab = free_.begin(); slab != free_.end(); ++slab) {
      if (slab->bytes < bytes) continue;
      if (best == free_.end() || slab->bytes < best->bytes) best = slab;
    }
    if (best != free_.end()) {
      Slab slab = std::move(*best);
      free_.erase(best);
      return slab;
    }
  }
  return Make(SizeOf(bytes));
}

void SlabPool::Give(Slab slab) {
  if (slab.memory == nullptr) return;
  const absl::MutexLock lock(&mu_);
  free_.push_back(std::move(slab));
}

absl::StatusOr<Slab> SlabPool::Make(size_t bytes) const {
  absl::StatusOr<DeviceMemory> memory = allocate_(bytes);
  if (!memory.ok()) return memory.status();
  return Slab{*std::move(memory), bytes, nullptr};
}

}  // namespace thinwire
