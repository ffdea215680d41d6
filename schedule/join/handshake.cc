#include "schedule/join/handshake.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

constexpr char kMember[] = " member=";  // each rank's own, so it follows what is compared

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
  std::string digest =
      absl::StrCat("wire=", kWireVersion, " framing=", kFramingVersion, " world=", size);
  for (const AgreedOption& option : ListAgreed(options, size)) {
    absl::StrAppend(&digest, " ", option.name, "=", option.value);
  }
  return digest;
}

absl::StatusOr<Roster> Handshake(Store& store, const std::string& prefix, int rank, int size,
                                 const Options& options, Deadline deadline, const Seat& seat) {
  const std::string mine = absl::StrCat(Digest(size, options), " epoch=", seat.epoch);
  if (absl::Status status =
          store.Set(KeyOf(prefix, rank), absl::StrCat(mine, kMember, TextOf(seat.member)));
      !status.ok()) {
    return status;
  }
  std::vector<Member> members;
  for (int peer = 0; peer < size; ++peer) {
    const absl::StatusOr<std::string> told = store.Get(KeyOf(prefix, peer), deadline);
    if (absl::IsDeadlineExceeded(told.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", peer, " did not come to the rendezvous that rank ", rank, " of ",
                       size, " waits at; start it, or raise the timeout"));
    }
    if (!told.ok()) return told.status();
    const std::pair<std::string, std::string> theirs =
        absl::StrSplit(*told, absl::MaxSplits(kMember, 1));
    if (theirs.first != mine) return Differs(rank, mine, peer, theirs.first);
    const std::optional<Member> member = ParseMember(theirs.second);
    if (!member.has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", peer, " told no role that rank ", rank,
                       " knows; use the same version of thinwire on every rank"));
    }
    members.push_back(*member);
  }
  return Roster::Of(seat.epoch, std::move(members));
}

}  // namespace thinwire
