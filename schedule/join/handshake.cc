#include "schedule/join/handshake.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/planes.h"

namespace thinwire {
namespace {

constexpr Role kRoles[] = {Role::kWorker, Role::kServer, Role::kSite};

absl::Status Number(Role role, std::vector<Member>& members) {
  const std::string name(Name(role));
  std::vector<int> ranks;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].role == role) ranks.push_back(static_cast<int>(rank));
  }
  const auto numbers_itself = [&](int rank) { return members[rank].index != Member::kByRank; };
  const auto count = std::count_if(ranks.begin(), ranks.end(), numbers_itself);
  if (count == 0) {
    for (size_t i = 0; i < ranks.size(); ++i) members[ranks[i]].index = static_cast<int>(i);
    return absl::OkStatus();
  }
  std::vector<int> owners(ranks.size(), -1);
  for (const int rank : ranks) {
    const int index = members[rank].index;
    if (index == Member::kByRank) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " is a ", name, " without an index, but rank ",
                       *std::find_if(ranks.begin(), ranks.end(), numbers_itself),
                       " has one; give an index to all members of a role, or to none"));
    }
    if (index < 0 || index >= static_cast<int>(ranks.size())) {
      return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " is ", name, " ", index,
                                                        ", expected 0 to ", ranks.size() - 1,
                                                        ", since there are ", ranks.size()));
    }
    if (owners[index] >= 0) {
      return absl::FailedPreconditionError(absl::StrCat("rank ", owners[index], " and rank ", rank,
                                                        " are both ", name, " ", index,
                                                        "; give each an index of its own"));
    }
    owners[index] = rank;
  }
  return absl::OkStatus();
}

}  // namespace

std::string TextOf(const Member& member) {
  const std::string role(Name(member.role));
  return member.index == Member::kByRank ? role : absl::StrCat(role, ":", member.index);
}

std::optional<Member> ParseMember(std::string_view text) {
  const size_t colon = text.find(':');
  for (const Role role : kRoles) {
    if (text.substr(0, colon) != Name(role)) continue;
    Member member{role, Member::kByRank};
    if (colon == std::string_view::npos) return member;
    const std::string index(text.substr(colon + 1));
    if (absl::SimpleAtoi(index, &member.index) && member.index >= 0) return member;
  }
  return std::nullopt;
}

absl::StatusOr<Roster> Roster::Of(uint64_t epoch, std::vector<Member> members) {
  for (const Role role : kRoles) {
    if (absl::Status bad = Number(role, members); !bad.ok()) return bad;
  }
  return Roster(epoch, std::move(members));
}

int Roster::count(Role role) const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(),
                                        [&](const Member& m) { return m.role == role; }));
}

int Roster::RankOf(Role role, int index) const {
  const auto found = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
    return member.role == role && member.index == index;
  });
  return static_cast<int>(found - members_.begin());
}

std::string Roster::NameOf(int rank) const {
  bool plain = true;
  for (int i = 0; i < size(); ++i) {
    plain = plain && members_[i].role == Role::kWorker && members_[i].index == i;
  }
  if (plain) return absl::StrCat("rank ", rank);
  return absl::StrCat("rank ", rank, " (", std::string(Name(members_[rank].role)), " ",
                      members_[rank].index, ")");
}

namespace {

constexpr char kMember[] = " member=";  // differs between ranks, so it follows the compared part

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
                                 const Options& options, Deadline deadline, const Member& member,
                                 uint64_t epoch) {
  const std::string mine = absl::StrCat(Digest(size, options), " epoch=", epoch);
  if (absl::Status status =
          store.Set(KeyOf(prefix, rank), absl::StrCat(mine, kMember, TextOf(member)));
      !status.ok()) {
    return status;
  }
  std::vector<Member> members;
  for (int peer = 0; peer < size; ++peer) {
    const absl::StatusOr<std::string> told =
        GetOfPeer(store, KeyOf(prefix, peer), peer, {rank, size}, deadline);
    if (absl::IsDeadlineExceeded(told.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", peer, " did not come to the rendezvous that rank ", rank, " of ",
                       size, " waits at; start it, or raise the timeout"));
    }
    if (!told.ok()) return told.status();
    const std::pair<std::string, std::string> theirs =
        absl::StrSplit(*told, absl::MaxSplits(kMember, 1));
    if (theirs.first != mine) return Differs(rank, mine, peer, theirs.first);
    const std::optional<Member> other = ParseMember(theirs.second);
    if (!other.has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", peer, " told no role that rank ", rank,
                       " knows; use the same version of thinwire on every rank"));
    }
    members.push_back(*other);
  }
  return Roster::Of(epoch, std::move(members));
}

absl::Status FailHandshake(Store& store, const std::string& prefix, int rank, absl::Status why) {
  return SetFailure(store, KeyOf(prefix, rank), std::move(why));
}

}  // namespace thinwire
