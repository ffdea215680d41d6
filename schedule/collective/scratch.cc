#include "schedule/collective/scratch.h"

namespace thinwire {
namespace {

constexpr size_t kLine = 64;

}  // namespace

MutableBytes Scratch::Take(size_t bytes) {
  if (next_ == blocks_.size()) blocks_.emplace_back();
  Block& block = blocks_[next_++];
  if (block.bytes < bytes || block.memory == nullptr) {
    if (absl::Status status = Grow(&block, bytes); !status.ok()) {
      status_ = std::move(status);
      return {static_cast<uint8_t*>(nullptr), bytes};
    }
  }
  const size_t skew = -reinterpret_cast<uintptr_t>(block.memory.get()) % kLine;
  return {block.memory.get() + skew, bytes};
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

absl::Status Scratch::Grow(Block* block, size_t bytes) {
  *block = {};  // first the old block goes
  if (device_ == nullptr) {
    block->memory = std::make_shared<uint8_t[]>(bytes + kLine);
  } else {
    absl::StatusOr<DeviceMemory> memory = device_->Allocate(bytes + kLine);
    if (!memory.ok()) return memory.status();
    block->memory = *std::move(memory);
  }
  block->bytes = bytes;
  return absl::OkStatus();
}

}  // namespace thinwire
