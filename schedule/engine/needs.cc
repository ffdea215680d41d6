#include "schedule/engine/needs.h"

#include <algorithm>

#include "schedule/engine/checks.h"
#include "schedule/engine/in_flight.h"
#include "transport/staged/staged.h"

namespace thinwire {
namespace {

constexpr size_t kAlignment = 256;  // of scratch behind a room, bytes

// Addresses that nobody looks at, but whose null-ness algorithms ask for: the tensors', and behind
// them the scratch.
uint8_t* Somewhere() { return reinterpret_cast<uint8_t*>(uintptr_t{1} << 20); }
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

std::shared_ptr<float[]> FloatsIf(bool wanted) {
  auto* const floats = wanted ? reinterpret_cast<float*>(Somewhere()) : nullptr;
  return {std::shared_ptr<float[]>(), floats};
}

}  // namespace

Needs Needs::Most(const Needs& a, const Needs& b) {
  return {std::max(a.room, b.room), std::max(a.scratch, b.scratch), std::max(a.pinned, b.pinned),
          a.blocks_in_scratch && b.blocks_in_scratch};
}

Needs NeedsOf(const ChunkJob& job, const Membership& members, const Device& device) {
  const std::unique_ptr<Rehearsal> rehearsal = device.Rehearse();
  Scratch endless(EndlessScratch());
  Needs needs;
  {
    const std::unique_ptr<ChunkRun> run =
        job.chunk->algorithm->Begin(job, {rehearsal->backend(), endless, members});
    for (;;) {
      const absl::StatusOr<const Hop*> hop = run->Advance();
      if (!hop.ok() || *hop == nullptr) break;
      const size_t pinned = Staged::SlabBytes(members.rank, (*hop)->send, (*hop)->recv);
      needs.pinned = std::max(needs.pinned, pinned);
      needs.blocks_in_scratch &= LieInScratch(**hop, members.rank);
    }
  }
  needs.scratch = endless.used();
  needs.room = (rehearsal->room() + kAlignment - 1) / kAlignment * kAlignment;
  return needs;
}

Needs NeedsOf(const std::shared_ptr<const Bucket>& bucket, const Options& options,
              const Membership& members, const Device& device) {
  const Report& report = bucket->report();
  const BucketLayout& layout = bucket->layout();
  InFlight work;  // its step is the first, when a warm-up sends most
  work.bucket = bucket;
  work.report = report;
  work.input = {Somewhere(), report.numel, static_cast<DType>(report.dtype)};
  work.output = work.input;
  work.output.numel = OutputNumel(bucket->collective(), report.numel, members.size);
  work.memory.residual = FloatsIf(bucket->needs_memory());
  work.memory.momentum = FloatsIf(layout.momentum);
  work.memory.carried = FloatsIf(layout.carried > 0);
  Needs needs;
  const auto add = [&] {
    for (uint32_t chunk = 0; chunk < report.chunks; ++chunk) {
      needs = Needs::Most(needs, NeedsOf(work.JobOf(chunk, options), members, device));
    }
  };
  add();
  if (bucket->collective() != Collective::kAllReduce) return needs;
  work.absent = {{0, report.numel}};
  add();
  return needs;
}

}  // namespace thinwire
