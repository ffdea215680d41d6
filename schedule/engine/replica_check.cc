#include "schedule/engine/replica_check.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/digest.h"

namespace thinwire {
namespace {

std::string Hex(uint64_t digest) { return absl::StrCat(absl::Hex(digest, absl::kZeroPad16)); }

// What most ranks have, and of several such values the lowest rank's.
uint64_t MostCommon(const std::vector<uint64_t>& digests) {
  return *std::max_element(digests.begin(), digests.end(), [&](uint64_t a, uint64_t b) {
    return std::count(digests.begin(), digests.end(), a) <
           std::count(digests.begin(), digests.end(), b);
  });
}

}  // namespace

ReplicaCheck::ReplicaCheck(const Membership& members, uint64_t every, ControlPlane* control,
                           FailureProtocol& failure)
    : members_(members), every_(every), control_(control), failure_(failure) {}

// The results of a reduce-scatter differ by their nature.
bool ReplicaCheck::IsDue(const Use& work) const {
  return every_ != 0 && control_ != nullptr && (work.step + 1) % every_ == 0 &&
         work.bucket->collective() != Collective::kReduceScatter;
}

void ReplicaCheck::OnChunk(Use& work, uint32_t chunk) const {
  if (!IsDue(work)) return;
  uint64_t digest = chunk;
  for (const Range& piece : work.bucket->partition().chunks[chunk].pieces) {
    const TensorView part = work.output.Slice(piece.begin, piece.end - piece.begin);
    digest =
        HashCombine(digest, DigestBytes({static_cast<const uint8_t*>(part.data), part.bytes()}));
  }
  work.digest.fetch_add(digest, std::memory_order_relaxed);  // chunks end in any order
}

void ReplicaCheck::OnDone(const Use& work) {
  if (!IsDue(work)) return;
  const DigestNote note{work.report, work.step, work.digest.load(std::memory_order_relaxed)};
  if (members_.rank == 0) return OnDigest(0, note);
  control_->Send(0, PackDigest(note)).IgnoreError();  // a failure of the plane is known elsewhere
}

void ReplicaCheck::OnDigest(int from, const DigestNote& note) {
  if (every_ == 0 || members_.rank != 0) return;  // no rank of ours sends one then
  std::vector<uint64_t> digests;
  {
    const absl::MutexLock lock(&mu_);
    Round& round = rounds_[note.report.id()];
    round.digests.resize(members_.size);
    round.there.resize(members_.size);
    round.digests[from] = note.digest;
    round.there[from] = true;
    if (std::find(round.there.begin(), round.there.end(), false) != round.there.end()) return;
    digests = std::move(round.digests);
    rounds_.erase(note.report.id());
  }
  const absl::Status status = Judge(note, digests);
  if (!status.ok()) failure_.Fail(status, FailureProtocol::Tell::kEveryone);
}

absl::Status ReplicaCheck::Judge(const DigestNote& note,
                                 const std::vector<uint64_t>& digests) const {
  const uint64_t expected = MostCommon(digests);
  std::vector<std::string> others;
  for (size_t rank = 0; rank < digests.size(); ++rank) {
    if (digests[rank] == expected) continue;
    others.push_back(absl::StrCat("rank ", rank, " has digest ", Hex(digests[rank])));
  }
  if (others.empty()) return absl::OkStatus();
  const auto first = std::find(digests.begin(), digests.end(), expected) - digests.begin();
  return absl::FailedPreconditionError(absl::StrCat(
      "tensor '", note.report.name, "', step ", note.step + 1, ": replicas have diverged, ",
      absl::StrJoin(others, ", "), ", expected ", Hex(expected), " as on rank ", first,
      "; look for faults of memory or network on that machine, and go back to a checkpoint"));
}

}  // namespace thinwire
