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

Partition PartitionOf(Collective collective, size_t numel, int world, const Options& options) {
  Segment whole;
  whole.count = whole.total = numel;
  return collective == Collective::kReduceScatter ? MakeReduceScatter({&whole, 1}, world, options)
                                                  : MakePartition({&whole, 1}, world, options);
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
  if (kept_.size() == kMostBuffers) Drop(by_use_.back());
  const size_t bytes = options_.codecs.front().uses_feedback() ? key.numel * sizeof(float) : 0;
  Room room = MakeRoom(bytes);
  if (room.memory != nullptr) FillWithZeros(room.memory.get(), bytes, stream);
  Buffer buffer{.partition = PartitionOf(key.collective, key.numel, world_, options_),
                .residual = std::move(room.memory),
                .number = made_++};
  by_use_.push_front(key);
  return kept_.emplace(key, Kept{std::move(buffer), room.bytes, by_use_.begin()})
      .first->second.buffer;
}

// New memory as long as there may be more, then that of a buffer that goes.
NcclBuffers::Room NcclBuffers::MakeRoom(size_t bytes) {
  const bool there_may_be_more = residual_bytes_ + bytes <= most_bytes_;
  if (bytes == 0 || (bytes > largest_ && !there_may_be_more)) return {};
  if (free_.lower_bound(bytes) == free_.end() && there_may_be_more) {
    absl::StatusOr<DeviceMemory> memory = device_.Allocate(bytes);
    if (!memory.ok()) return {};
    residual_bytes_ += bytes;
    largest_ = std::max(largest_, bytes);
    return {*std::move(memory), bytes};
  }
  if (free_.lower_bound(bytes) == free_.end()) {
    const auto goes = std::find_if(by_use_.rbegin(), by_use_.rend(),
                                   [&](const Key& key) { return kept_.at(key).room >= bytes; });
    if (goes == by_use_.rend()) return {};
    Drop(*goes);
  }
  const auto room = free_.extract(free_.lower_bound(bytes));
  return {std::move(room.mapped()), room.key()};
}

void NcclBuffers::FillWithZeros(uint8_t* memory, size_t bytes, DeviceStream& stream) const {
  for (size_t at = 0; at < bytes; at += kZeros) {
    stream.Copy(memory + at, zeros_.get(), std::min(kZeros, bytes - at));
  }
}

void NcclBuffers::Drop(Key key) {
  const auto kept = kept_.extract(key);
  by_use_.erase(kept.mapped().place);
  DeviceMemory& residual = kept.mapped().buffer.residual;
  if (residual != nullptr) free_.emplace(kept.mapped().room, std::move(residual));
}

}  // namespace thinwire
