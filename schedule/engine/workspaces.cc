#include "schedule/engine/workspaces.h"

#include <algorithm>
#include <utility>

#include "transport/staged/staged.h"

namespace thinwire {
namespace {

constexpr size_t kAlignment = 256;  // bytes; of scratch, which follows the room

// Stands for scratch in a rehearsal, at addresses above any memory of a job.
MutableBytes EndlessScratch() {
  return {reinterpret_cast<uint8_t*>(uintptr_t{1} << 62), size_t{1} << 61};
}

bool LieInScratch(const Hop& hop, int rank) {
  const uint8_t* const begin = EndlessScratch().data();
  for (size_t r = 0; r < hop.send.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    if (!hop.send[r].empty() && hop.send[r].data() < begin) return false;
    if (!hop.recv[r].empty() && hop.recv[r].data() < begin) return false;
  }
  return true;
}

// A workspace on a device, with its own codecs and memory.
struct InSlab final : Workspace {
  InSlab(std::unique_ptr<Backend> codecs, const Membership& members, MutableBytes memory, Slab slab,
         SlabPool& pool)
      : Workspace(*codecs, members, memory),
        codecs(std::move(codecs)),
        slab(std::move(slab)),
        pool(&pool) {}
  // The device has no memory left: taking scratch returns `reason`.
  InSlab(std::unique_ptr<Backend> codecs, const Membership& members, absl::Status reason)
      : Workspace(*codecs, members, std::move(reason)), codecs(std::move(codecs)) {}

  const std::unique_ptr<Backend> codecs;
  Slab slab;
  SlabPool* const pool = nullptr;  // that the slab came from
};

}  // namespace

ChunkMemory ChunkMemory::Most(const ChunkMemory& a, const ChunkMemory& b) {
  return {std::max(a.room, b.room), std::max(a.scratch, b.scratch), std::max(a.pinned, b.pinned),
          a.blocks_in_scratch && b.blocks_in_scratch};
}

ChunkMemory MemoryOf(const ChunkJob& job, const Membership& members, const Device& device) {
  const std::unique_ptr<Rehearsal> rehearsal = device.Rehearse();
  Workspace endless(rehearsal->backend(), members, EndlessScratch());
  ChunkMemory most;
  {
    const std::unique_ptr<ChunkRun> run = job.chunk->algorithm->begin(job, endless);
    for (;;) {
      const absl::StatusOr<const Hop*> hop = run->Advance();
      if (!hop.ok() || *hop == nullptr) break;
      const size_t pinned = Staged::SlabBytes(members.rank, (*hop)->send, (*hop)->recv);
      most.pinned = std::max(most.pinned, pinned);
      most.blocks_in_scratch &= LieInScratch(**hop, members.rank);
    }
  }
  most.scratch = endless.used();
  most.room = (rehearsal->room() + kAlignment - 1) / kAlignment * kAlignment;
  return most;
}

Workspaces::Pools::Pools(Device& device, DataPlane* plane)
    : on_device(device, SlabPool::Memory::kDevice), pinned(device, SlabPool::Memory::kPinned) {
  StreamPlane* const streams = plane == nullptr ? nullptr : plane->of_streams();
  if (streams == nullptr || !streams->traits().allocates) return;
  of_plane.emplace([streams](size_t bytes) { return streams->Allocate(bytes); });
}

Workspaces::Workspaces(Device* device, DataPlane* plane, std::chrono::milliseconds patience)
    : device_(device),
      plane_(plane),
      members_(plane == nullptr ? Membership{} : plane->members()),
      patience_(patience) {
  if (device != nullptr) pools_.emplace(*device, plane);
}

// An exchange must not mix blocks in the plane's own memory with others: a chunk that sends or
// receives tensors directly uses no plane memory at all.
SlabPool& Workspaces::PoolFor(const ChunkMemory& size) {
  const bool of_plane = pools_->of_plane.has_value() && size.blocks_in_scratch;
  return of_plane ? *pools_->of_plane : pools_->on_device;
}

absl::Status Workspaces::Reserve(uint64_t user, const ChunkMemory& size) {
  absl::Status status = PoolFor(size).Reserve(user, size.on_device());
  const bool staged = plane_ != nullptr && plane_->traits().memory == Memory::kHost;
  if (!status.ok() || !staged) return status;
  return pools_->pinned.Reserve(user, size.pinned);
}

absl::Status Workspaces::ReserveForAll(const ChunkMemory& size) {
  int chunks;
  {
    const absl::MutexLock lock(&mu_);
    if (std::find(for_all_.begin(), for_all_.end(), size) == for_all_.end()) {
      for_all_.push_back(size);
    }
    chunks = at_once_;
  }
  return ReserveFrom(0, chunks, {&size, 1});
}

absl::Status Workspaces::SetAtOnce(int chunks) {
  std::vector<ChunkMemory> reserved;
  int before;
  {
    const absl::MutexLock lock(&mu_);
    if (chunks <= at_once_) return absl::OkStatus();
    before = std::exchange(at_once_, chunks);
    reserved = for_all_;
  }
  return ReserveFrom(before, chunks, reserved);
}

absl::Status Workspaces::ReserveFrom(int first, int chunks, std::span<const ChunkMemory> reserved) {
  for (int chunk = first; chunk < chunks; ++chunk) {
    for (const ChunkMemory& size : reserved) {
      absl::Status status = Reserve(chunk, size);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<Workspace> Workspaces::Take(const ChunkMemory& size, DeviceStream* stream) {
  if (stream != nullptr) return TakeOnDevice(size, *stream);
  {
    const absl::MutexLock lock(&mu_);
    if (!of_host_.empty()) {
      std::unique_ptr<Workspace> spare = std::move(of_host_.back());
      of_host_.pop_back();
      return spare;
    }
  }
  return std::make_unique<Workspace>(CpuBackend(), members_);
}

std::unique_ptr<Workspace> Workspaces::TakeOnDevice(const ChunkMemory& size, DeviceStream& stream) {
  SlabPool& pool = PoolFor(size);
  Slab slab;
  if (size.on_device() > 0) {
    absl::StatusOr<Slab> taken = pool.Take(size.on_device());
    if (!taken.ok())
      return std::make_unique<InSlab>(stream.BackendIn({}), members_, taken.status());
    slab = *std::move(taken);
  }
  stream.WaitFor(slab.used);
  const MutableBytes memory(slab.memory.get(), size.on_device());
  return std::make_unique<InSlab>(stream.BackendIn(memory.first(size.room)), members_,
                                  memory.subspan(size.room), std::move(slab), pool);
}

void Workspaces::Give(std::unique_ptr<Workspace> lent, std::shared_ptr<DeviceEvent> used) {
  if (device_ != nullptr) {
    auto& in_slab = static_cast<InSlab&>(*lent);
    Slab slab = std::move(in_slab.slab);
    SlabPool* const pool = in_slab.pool;
    lent.reset();
    slab.used = std::move(used);
    if (pool != nullptr) pool->Give(std::move(slab));
    return;
  }
  const absl::MutexLock lock(&mu_);
  of_host_.push_back(std::move(lent));
}

absl::StatusOr<std::unique_ptr<DataPlane>> Workspaces::PlaneOn(DeviceStream& stream) {
  if (StreamPlane* const streams = plane_->of_streams()) return streams->On(stream);
  return Staged::Make(*plane_, *device_, stream, pools_->pinned, patience_);
}

}  // namespace thinwire
