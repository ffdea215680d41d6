// SpareBlocks: memory of finished exchanges, kept for the next ones.
#ifndef THINWIRE_TRANSPORT_CHECKED_SPARE_BLOCKS_H_
#define THINWIRE_TRANSPORT_CHECKED_SPARE_BLOCKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "compress/types.h"

namespace thinwire {

// Thread-safe. In steady state, which repeats the sizes of exchanges, it allocates nothing.
class SpareBlocks {
 public:
  struct Block {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
    MutableBytes first(size_t count) const { return {memory.get(), count}; }
  };

  // At least that many bytes, of any content: the smallest spare block that has them.
  Block Take(size_t bytes) {
    {
      const absl::MutexLock lock(&mu_);
      auto best = free_.end();
      for (auto block = free_.begin(); block != free_.end(); ++block) {
        if (block->bytes < bytes || block->bytes > 2 * bytes + kAnySize) continue;
        if (best == free_.end() || block->bytes < best->bytes) best = block;
      }
      if (best != free_.end()) {
        std::swap(*best, free_.back());
        Block block = std::move(free_.back());
        free_.pop_back();
        return block;
      }
    }
    return {std::unique_ptr<uint8_t[]>(new uint8_t[bytes]), bytes};  // not zeroed
  }

  void Give(Block block) {
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(block));
  }

 private:
  // A small exchange must not hold a large one's block.
  static constexpr size_t kAnySize = 4096;

  absl::Mutex mu_;
  std::vector<Block> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CHECKED_SPARE_BLOCKS_H_
