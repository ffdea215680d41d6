// Handshake: before connecting, all ranks compare what they must agree on, and learn the members.
#ifndef THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
#define THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "schedule/options.h"
#include "transport/store.h"

namespace thinwire {

// worker: computes gradients. server: keeps parameters for workers. site: stands for a group of
// workers among other such groups.
enum class Role : uint8_t { kWorker, kServer, kSite };

constexpr std::string_view Name(Role role) {
  switch (role) {
    case Role::kWorker: return "worker";
    case Role::kServer: return "server";
    case Role::kSite: return "site";
  }
  return "unknown role";
}

struct Member {
  Role role = Role::kWorker;
  int index = kByRank;  // from 0, among the members of its role

  static constexpr int kByRank = -1;  // numbered in the order of ranks; all or no members of a role
};

// The text in a handshake: "worker", or "server:1" with an index.
std::string TextOf(const Member& member);
std::optional<Member> ParseMember(std::string_view text);

// Roster: the members of a group in one epoch. Ranks number them for the transport; role and index
// say what each one does, and stay the same when ranks change.
class Roster {
 public:
  Roster() = default;

  // `members`: by rank; kByRank becomes an index. FailedPrecondition, naming the ranks at fault,
  // unless each role has each index from 0 on exactly once. `epoch` grows whenever members change.
  static absl::StatusOr<Roster> Of(uint64_t epoch, std::vector<Member> members);

  uint64_t epoch() const { return epoch_; }
  int size() const { return static_cast<int>(members_.size()); }
  const Member& member(int rank) const { return members_[rank]; }
  int count(Role role) const;
  // The rank of an existing member.
  int RankOf(Role role, int index) const;
  // For messages: "rank 3" if all members are workers whose indexes are their ranks; else with role
  // and index, "rank 3 (server 1)".
  std::string NameOf(int rank) const;

 private:
  Roster(uint64_t epoch, std::vector<Member> members)
      : epoch_(epoch), members_(std::move(members)) {}

  uint64_t epoch_ = 0;
  std::vector<Member> members_ = {Member{Role::kWorker, 0}};
};

// Everything that must be equal on all ranks, as text: "wire=2 framing=2 world=2 codec=int4 ...".
std::string Digest(int size, const Options& options);

// Writes this rank's digest, member and epoch under `prefix`, reads all ranks', and returns the
// roster. FailedPrecondition names the first rank that differs, and in what (including the epoch),
// or the ranks whose roles or indexes contradict each other; DeadlineExceeded a rank that never
// came; Unavailable a rank that called FailHandshake, and why.
absl::StatusOr<Roster> Handshake(Store& store, const std::string& prefix, int rank, int size,
                                 const Options& options, Deadline deadline,
                                 const Member& member = {}, uint64_t epoch = 0);

// For a rank that fails before its handshake: its peers' handshakes fail with `why`. Returns `why`.
absl::Status FailHandshake(Store& store, const std::string& prefix, int rank, absl::Status why);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_HANDSHAKE_H_
