// Scratch: the memory that a chunk is worked on with.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "compress/types.h"

namespace thinwire {

// Scratch memory of the host grows to the largest chunk seen and is then reused: blocks are kept in
// the order in which they were requested, so the same requests again allocate nothing. On a device
// it is memory of the caller. Not thread-safe.
class Scratch {
 public:
  Scratch() = default;  // of the host
  // Hands out that memory from its begin on, which is aligned to a cache line.
  explicit Scratch(MutableBytes memory) : grows_(false), memory_(memory) {}
  // There is none, for that reason.
  explicit Scratch(absl::Status reason) : grows_(false), status_(std::move(reason)) {}

  // Forgets what was handed out.
  void Reset() { next_ = used_ = 0; }

  // `bytes` of memory, aligned to a cache line, valid until Reset. Its content is whatever it was.
  // Where there is none left the block is null: look at status() before using any.
  MutableBytes Take(size_t bytes);

  // `count` of them, which follow one another in one array where all stay aligned by that: planes
  // that have a gather of their own need its blocks so.
  std::vector<MutableBytes> TakeArray(size_t count, size_t bytes);

  template <typename T>
  std::span<T> TakeOf(size_t count) {
    return {reinterpret_cast<T*>(Take(count * sizeof(T)).data()), count};
  }

  const absl::Status& status() const { return status_; }
  // The bytes of the caller's memory that were handed out since Reset.
  size_t used() const { return used_; }

 private:
  struct Block {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
  };
  MutableBytes TakeOfMemory(size_t bytes);

  const bool grows_ = true;
  const MutableBytes memory_;  // the caller's
  size_t used_ = 0;
  absl::Status status_;
  std::vector<Block> blocks_;
  size_t next_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_SCRATCH_H_
