#include "schedule/join/handshake.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "schedule/settle.h"
#include "transport/transport.h"

namespace thinwire {
namespace {

std::string KeyOf(const std::string& prefix, int rank) {
  return absl::StrCat(prefix, "handshake/", rank);
}

absl::Status Differs(int rank, const std::string& mine, int peer, const std::string& theirs) {
  const std::vector<std::string> own = absl::StrSplit(mine, ' ');
  const std::vector<std::string> other = absl::StrSplit(theirs, ' ');
  std::string expected = mine, got = theirs;
  for (size_t i = 0; i < own.size() && i < other.size(); ++i) {
    if (own[i] == other[i]) continue;
    expected = own[i];
    got = other[i];
    break;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " was set up with ", expected, ", but rank ", peer, " with ", got,
                   "; use the same options and the same version on every rank"));
}

}  // namespace

std::string Digest(int size, const Options& options) {
  std::vector<std::string> codecs;
  for (const CodecPair& codec : options.codecs) codecs.push_back(codec.ToString());
  return absl::StrCat(
      "wire=", kWireVersion, " framing=", kFramingVersion, " world=", size,
      " codec=", absl::StrJoin(codecs, ";"), " momentum=", options.momentum.beta,
      options.momentum.nesterov ? " nesterov=1" : " nesterov=0",
      " policy=", std::string(Name(options.policy)), " lanes=", options.lanes,
      " chunk_bytes=", Settle(options, size)->chunk_bytes, " min_bytes=", options.min_bytes,
      " one_hop_bytes=", options.one_hop_bytes, " checksum=", options.checksum ? 1 : 0,
      " topology=", std::string(Name(options.topology)), " local_size=", options.local_size,
      " check_replicas=", options.check_replicas,
      " transport=", std::string(Name(options.transport)), " loops=", options.loops);
}

absl::Status Handshake(Store& store, const std::string& prefix, int rank, int size,
                       const Options& options, Deadline deadline) {
  const std::string mine = Digest(size, options);
  if (absl::Status status = store.Set(KeyOf(prefix, rank), mine); !status.ok()) return status;
  for (int peer = 0; peer < size; ++peer) {
    const absl::StatusOr<std::string> theirs = store.Get(KeyOf(prefix, peer), deadline);
    if (absl::IsDeadlineExceeded(theirs.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", peer, " did not come to the rendezvous that rank ", rank, " of ",
                       size, " waits at; start it, or raise the timeout"));
    }
    if (!theirs.ok()) return theirs.status();
    if (*theirs != mine) return Differs(rank, mine, peer, *theirs);
  }
  return absl::OkStatus();
}

}  // namespace thinwire
