// SlabPool: pieces of device memory, or of pinned host memory, that are reused, so that a step
// allocates none from the driver: that is slow, and waits for the whole device.
#ifndef THINWIRE_TRANSPORT_STAGED_SLAB_POOL_H_
#define THINWIRE_TRANSPORT_STAGED_SLAB_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/device.h"

namespace thinwire {

struct Slab {
  DeviceMemory memory;
  size_t bytes = 0;
  // The end of the last user's work, after which the next one's must run. Null: none.
  std::shared_ptr<DeviceEvent> used;
};

// Slabs have sizes of powers of two and stay until the pool is destroyed, so buckets of growing
// sizes reserve at most twice what the largest needs. Thread-safe. The device must outlive the
// pool, and the pool must outlive all work on its slabs.
class SlabPool {
 public:
  enum class Memory { kDevice, kPinned };
  SlabPool(Device& device, Memory memory);
  // A pool of memory from `allocate`, which must be thread-safe.
  using Allocator = std::function<absl::StatusOr<DeviceMemory>(size_t bytes)>;
  explicit SlabPool(Allocator allocate) : allocate_(std::move(allocate)) {}

  // Allocates a slab for a user who will take slabs of this size, one at a time. As long as nobody
  // takes what was not reserved, Take allocates nothing. Repeating a reservation costs nothing.
  // ResourceExhausted if memory is short.
  absl::Status Reserve(uint64_t user, size_t bytes);

  // Returns the smallest free slab of at least this size; allocates one if there is none.
  // ResourceExhausted if memory is short.
  absl::StatusOr<Slab> Take(size_t bytes);
  void Give(Slab slab);

 private:
  using Reservation = std::pair<uint64_t, size_t>;  // user, bytes

  absl::StatusOr<Slab> Make(size_t bytes) const;

  const Allocator allocate_;
  absl::Mutex mu_;
  std::set<Reservation> reserved_ ABSL_GUARDED_BY(mu_);
  std::vector<Slab> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STAGED_SLAB_POOL_H_
