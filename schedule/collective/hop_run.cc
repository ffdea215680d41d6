#include "schedule/collective/hop_run.h"

namespace thinwire {

std::vector<size_t> Algorithm::ShardBounds(Range chunk, int world, size_t) const {
  return std::vector<size_t>(world + 1, chunk.end);
}

Range Algorithm::SecondHop(const Chunk&, int) const { return {}; }

std::vector<PhaseCost> Algorithm::Costs(const Chunk& chunk, const CodecPair& codec) const {
  const auto numel = static_cast<double>(chunk.numel());
  const int peers = chunk.world() - 1;
  const auto bytes = static_cast<double>(EncodedBytes(codec.up, chunk.numel()));
  return {{.encoded = numel, .bytes = bytes * peers, .peers = peers},
          {.reduced = numel, .decoded = numel}};
}

HopRun::HopRun(const ChunkJob& job, const Bench& bench)
    : job_(job), bench_(bench), n_(bench.members.size), me_(bench.members.rank) {
  bench_.scratch.Reset();
}

absl::StatusOr<const Hop*> HopRun::Advance() {
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

void HopRun::Exchange(Stage made_in, Stage stage, std::span<const Bytes> send,
                      std::span<const MutableBytes> recv, std::span<const MutableBytes> next) {
  hop_ = {made_in, stage, Tag(++hops_), send, recv};
  if (!next.empty()) hop_.next = {Tag(hops_ + 1), next};
  is_due_ = true;
}

std::span<const Bytes> HopRun::Each(std::span<const MutableBytes> blocks) {
  send_.assign(blocks.begin(), blocks.end());
  return send_;
}

std::span<const Bytes> HopRun::ToAll(Bytes block) {
  send_.assign(n_, block);
  return send_;
}

std::span<float> HopRun::TakeReduceScratch(size_t wires, size_t numel) {
  const size_t floats = bench_.backend.ReduceScratchFloats(wires, numel);
  return floats == 0 ? std::span<float>() : bench_.scratch.TakeOf<float>(floats);
}

}  // namespace thinwire
