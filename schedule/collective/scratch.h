// Scratch: the memory that a chunk is worked on with. It grows to the largest chunk seen and is
// then reused.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "compress/device.h"
#include "compress/types.h"

namespace thinwire {

// Blocks are kept by the order in which they were asked for, so whoever asks for the same again
// allocates nothing. Not thread-safe.
class Scratch {
 public:
  // Memory of the host (null), or of a device, which outlives it.
  explicit Scratch(Device* device = nullptr) : device_(device) {}

  // Forgets what was handed out.
  void Reset() { next_ = 0; }

  // `bytes` of memory, aligned to a cache line, valid until Reset. Its content is whatever it was.
  // Where a device has no memory left the block is null: look at status() before using any.
  MutableBytes Take(size_t bytes);

  // `count` of them, which follow one another in one array where all stay aligned by that: planes
  // that have a gather of their own need its blocks so.
  std::vector<MutableBytes> TakeArray(size_t count, size_t bytes);

  template <typename T>
  std::span<T> TakeOf(size_t count) {
    return {reinterpret_cast<T*>(Take(count * sizeof(T)).data()), count};
  }

  const absl::Status& status() const { return status_; }

 private:
  struct Block {
    std::shared_ptr<uint8_t[]> memory;
    size_t bytes = 0;
  };
  absl::Status Grow(Block* block, size_t bytes);

  Device* const device_;
  absl::Status status_;
  std::vector<Block> blocks_;
  size_t next_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_
