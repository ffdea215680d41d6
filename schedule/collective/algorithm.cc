#include "schedule/collective/algorithm.h"

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

std::vector<size_t> OwnNothing(Range chunk, int world, size_t) {
  return std::vector<size_t>(world + 1, chunk.end);
}

Range NoSecondHop(const Chunk&, int) { return {}; }

std::vector<PhaseCost> CostsOfOneHop(const Chunk& chunk, const CodecPair& codec) {
  const auto numel = static_cast<double>(chunk.numel());
  const int peers = chunk.world() - 1;
  const auto bytes = static_cast<double>(EncodedBytes(codec.up, chunk.numel()));
  return {{.encoded = numel, .bytes = bytes * peers, .peers = peers},
          {.reduced = numel, .decoded = numel}};
}

ChunkRun::ChunkRun(const ChunkJob& job, const Bench& bench)
    : job_(job), bench_(bench), n_(bench.members.size), me_(bench.members.rank) {
  bench_.scratch.Reset();
}

absl::StatusOr<const Hop*> ChunkRun::Advance() {
  if (phase_ == 0) {
    if (!bench_.scratch.status().ok()) return bench_.scratch.status();
    for (const Range& kept : Kept()) {
      if (job_.undo == nullptr) break;
      job_.undo->Save(bench_.backend, kept, job_.residual, job_.momentum.velocity);
    }
  }
  is_due_ = false;
  if (absl::Status status = Work(phase_++); !status.ok()) return status;
  return is_due_ ? &hop_ : nullptr;
}

void ChunkRun::Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                        std::span<const MutableBytes> recv, std::span<const MutableBytes> next) {
  hop_ = {made_in, stage, Tag(++hops_), send, recv};
  if (!next.empty()) hop_.next = {Tag(hops_ + 1), next};
  is_due_ = true;
}

std::span<const Bytes> ChunkRun::Each(std::span<const MutableBytes> blocks) {
  send_.assign(blocks.begin(), blocks.end());
  return send_;
}

std::span<const Bytes> ChunkRun::ToAll(Bytes block) {
  send_.assign(n_, block);
  return send_;
}

std::span<float> ChunkRun::TakeReduceScratch(size_t wires, size_t numel) {
  const size_t floats = bench_.backend.ReduceScratchFloats(wires, numel);
  return floats == 0 ? std::span<float>() : bench_.scratch.TakeOf<float>(floats);
}

}  // namespace thinwire
