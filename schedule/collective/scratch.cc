#include "schedule/collective/scratch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kLine = 64;

}  // namespace

MutableBytes Scratch::Take(size_t bytes) {
  if (!grows_) return TakeOfMemory(bytes);
  if (next_ == blocks_.size()) blocks_.emplace_back();
  Block& block = blocks_[next_++];
  if (block.bytes < bytes || block.memory == nullptr) {
    block = {};  // first the old block goes
    block = {std::make_unique<uint8_t[]>(bytes + kLine), bytes};
  }
  const size_t skew = -reinterpret_cast<uintptr_t>(block.memory.get()) % kLine;
  return {block.memory.get() + skew, bytes};
}

MutableBytes Scratch::TakeOfMemory(size_t bytes) {
  if (status_.ok() && memory_.size() - used_ < bytes) {
    status_ = absl::InternalError(absl::StrCat("a chunk takes ", used_ + bytes,
                                               " bytes of a device's memory, expected ",
                                               memory_.size(), "; report this with its codec"));
  }
  if (!status_.ok()) return {static_cast<uint8_t*>(nullptr), bytes};
  const MutableBytes taken = memory_.subspan(used_, bytes);
  used_ = std::min(memory_.size(), (used_ + bytes + kLine - 1) / kLine * kLine);
  return taken;
}

std::vector<MutableBytes> Scratch::TakeArray(size_t count, size_t bytes) {
  std::vector<MutableBytes> blocks;
  if (bytes % kLine != 0) {
    for (size_t i = 0; i < count; ++i) blocks.push_back(Take(bytes));
    return blocks;
  }
  const MutableBytes array = Take(count * bytes);
  for (size_t i = 0; i < count; ++i) blocks.push_back({array.data() + i * bytes, bytes});
  return blocks;
}

}  // namespace thinwire
