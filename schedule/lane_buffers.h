// LaneBuffers: a lane's memory. It grows to the largest chunk seen and is then reused.
#ifndef THINWIRE_SCHEDULE_LANE_BUFFERS_H_
#define THINWIRE_SCHEDULE_LANE_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/types.h"

namespace thinwire {

// Blocks are kept by their turn, so a lane that does the same again allocates nothing.
class LaneBuffers {
 public:
  // Forgets what was handed out.
  void Reset() { next_ = 0; }

  // `bytes` of memory, aligned to a cache line, valid until Reset. Its content is whatever it was.
  MutableBytes Take(size_t bytes) {
    if (next_ == blocks_.size()) blocks_.emplace_back();
    std::vector<uint8_t>& block = blocks_[next_++];
    if (block.size() < bytes + kLine) block = std::vector<uint8_t>(bytes + kLine);
    const size_t skew = kLine - reinterpret_cast<uintptr_t>(block.data()) % kLine;
    return {block.data() + skew, bytes};
  }

  template <typename T>
  std::span<T> TakeOf(size_t count) {
    return {reinterpret_cast<T*>(Take(count * sizeof(T)).data()), count};
  }

 private:
  static constexpr size_t kLine = 64;
  std::vector<std::vector<uint8_t>> blocks_;
  size_t next_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_LANE_BUFFERS_H_
