#include "transport/mesh/meeting.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace thinwire {
namespace {

// The value of `rank`'s key in the store.
absl::StatusOr<std::string> Read(const MeshOptions& options, const std::string& key, int rank) {
  absl::StatusOr<std::string> value =
      options.store->Get(absl::StrCat(options.prefix, key), options.deadline);
  if (value.ok() || !absl::IsDeadlineExceeded(value.status())) return value;
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", options.rank, " of ", options.size, " could not connect: rank ", rank,
      " did not come; start it, or raise the timeout (", value.status().message(), ")"));
}

absl::StatusOr<std::string> Token(const MeshOptions& options) {
  constexpr char kKey[] = "mesh/token";
  if (options.rank != 0) return Read(options, kKey, 0);
  std::string token = MakeToken();
  const absl::Status set = options.store->Set(absl::StrCat(options.prefix, kKey), token);
  if (!set.ok()) return set;
  return token;
}

absl::Status OtherKey(int rank, const GroupKey& mine, int peer, bool theirs_from_file) {
  const std::string ranks = absl::StrCat("rank ", peer, " and rank ", rank);
  std::string what;
  if (mine.from_file() != theirs_from_file) {
    const int with = theirs_from_file ? peer : rank, without = theirs_from_file ? rank : peer;
    what = absl::StrCat("rank ", with, " has a key file, but rank ", without,
                        " has none; set THINWIRE_KEY_FILE on every rank or on none");
  } else if (mine.from_file()) {
    what = absl::StrCat(ranks, " have key files with different keys; copy one file to every rank");
  } else {
    what = absl::StrCat(ranks,
                        " read different tokens in the rendezvous store; does it hold keys "
                        "of an earlier run? Use a fresh store, or another group name");
  }
  return absl::FailedPreconditionError(what);
}

std::string HelloOf(const Address& address, const GroupKey& key) {
  return absl::StrCat(address.Host(), " ", address.Port(), " ", key.fingerprint());
}

absl::StatusOr<Address> ReadHello(const MeshOptions& options, const GroupKey& key, int peer) {
  const absl::StatusOr<std::string> hello = Read(options, absl::StrCat("mesh/", peer), peer);
  if (!hello.ok()) return hello.status();
  const std::vector<std::string> fields = absl::StrSplit(*hello, ' ');
  int port = 0;
  if (fields.size() == 3 && fields[2] != key.fingerprint()) {
    return OtherKey(options.rank, key, peer, absl::StartsWith(fields[2], "file-"));
  }
  if (fields.size() == 3 && absl::SimpleAtoi(fields[1], &port)) {
    if (absl::StatusOr<Address> address = Address::Of(fields[0], port); address.ok()) {
      return address;
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", options.rank, " found no address of rank ", peer,
                   " in the rendezvous store, but something else; use the same version of thinwire "
                   "on every rank"));
}

}  // namespace

absl::StatusOr<Meeting> Meet(const MeshOptions& options, const std::string& secret,
                             const Address& listening) {
  const absl::StatusOr<std::string> token = Token(options);
  if (!token.ok()) return token.status();
  Meeting meeting{GroupKey(secret, *token), std::vector<Address>(options.size)};
  const absl::Status set = options.store->Set(absl::StrCat(options.prefix, "mesh/", options.rank),
                                              HelloOf(listening, meeting.key));
  if (!set.ok()) return set;
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    const absl::StatusOr<Address> address = ReadHello(options, meeting.key, peer);
    if (!address.ok()) return address.status();
    meeting.addresses[peer] = *address;
  }
  return meeting;
}

}  // namespace thinwire
