// SlabPool: pieces of a device's memory, or of pinned host memory, that go from user to user, so
// that a step need not ask the driver for any: that takes long, and waits for the whole device.
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
  // The work of the last user, which the next one's comes after. Null: none.
  std::shared_ptr<DeviceEvent> used;
};

// Slabs have sizes of powers of two and stay until the pool ends, so that what buckets of growing
// sizes have reserved is at most twice what the largest needs. Thread-safe. The device outlives the
// pool, and the pool outlives all work on its slabs.
class SlabPool {
 public:
  enum class Memory { kDevice, kPinned };
  SlabPool(Device& device, Memory memory);
  // A pool of memory that `allocate` makes, which is thread-safe.
  using Allocator = std::function<absl::StatusOr<DeviceMemory>(size_t bytes)>;
  explicit SlabPool(Allocator allocate) : allocate_(std::move(allocate)) {}

  // Allocates a slab for a user who will take as many bytes, one at a time. As long as nobody takes
  // what it has not reserved, Take allocates nothing. Asking again costs nothing.
  // ResourceExhausted.
  absl::Status Reserve(uint64_t user, size_t bytes);

  // The smallest free slab of so many bytes; one more is allocated if there is none.
  // ResourceExhausted.
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
