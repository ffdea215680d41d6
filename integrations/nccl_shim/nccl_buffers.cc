#include "integrations/nccl_shim/nccl_buffers.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace thinwire {
namespace {

constexpr size_t kZeros = size_t{1} << 20;  // bytes
// Buffers without a residual are small, but a program may have a new one in each step.
constexpr size_t kMostBuffers = 4096;

}  // namespace

Partition PartitionOf(size_t numel, int world, const Options& options) {
  Segment whole;
  whole.count = whole.total = numel;
  return MakePartition({&whole, 1}, world, options);
}

absl::Status NcclBuffers::Prepare() {
  absl::StatusOr<DeviceMemory> zeros = device_.AllocatePinned(kZeros);
  if (!zeros.ok()) return zeros.status();
  zeros_ = *std::move(zeros);
  std::memset(zeros_.get(), 0, kZeros);
  return absl::OkStatus();
}

NcclBuffers::Buffer& NcclBuffers::Use(const Key& key, DeviceStream& stream) {
  if (const auto found = kept_.find(key); found != kept_.end()) {
    by_use_.splice(by_use_.begin(), by_use_, found->second.place);
    ++found->second.buffer.uses;
    return found->second.buffer;
  }
  if (kept_.size() == kMostBuffers) Drop(kept_.find(by_use_.back()));
  const bool feeds_back = options_.codecs.front().uses_feedback();
  Buffer buffer{.partition = PartitionOf(key.numel, world_, options_),
                .residual = feeds_back ? MakeResidual(key.numel, stream) : nullptr,
                .number = made_++};
  by_use_.push_front(key);
  return kept_.emplace(key, Kept{std::move(buffer), by_use_.begin()}).first->second.buffer;
}

DeviceMemory NcclBuffers::MakeResidual(size_t numel, DeviceStream& stream) {
  const size_t bytes = numel * sizeof(float);
  if (bytes > most_bytes_) return nullptr;
  MakeRoom(bytes);
  absl::StatusOr<DeviceMemory> memory = device_.Allocate(bytes);
  if (!memory.ok()) return nullptr;
  for (size_t at = 0; at < bytes; at += kZeros) {
    stream.Copy(memory->get() + at, zeros_.get(), std::min(kZeros, bytes - at));
  }
  residual_bytes_ += bytes;
  return *std::move(memory);
}

void NcclBuffers::MakeRoom(size_t bytes) {
  while (!by_use_.empty() && residual_bytes_ + bytes > most_bytes_) {
    Drop(kept_.find(by_use_.back()));
  }
}

void NcclBuffers::Drop(std::map<Key, Kept>::iterator kept) {
  if (kept->second.buffer.residual != nullptr) {
    residual_bytes_ -= kept->first.numel * sizeof(float);
  }
  by_use_.erase(kept->second.place);
  kept_.erase(kept);
}

}  // namespace thinwire
