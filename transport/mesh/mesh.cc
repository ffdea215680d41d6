#include "transport/mesh/mesh.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/mesh/callers.h"
#include "transport/mesh/door.h"
#include "transport/mesh/hmac.h"
#include "transport/mesh/listener.h"
#include "transport/mesh/meeting.h"

namespace thinwire {
namespace {

// For poll. Rounded up, so that what is due in less than one is not asked for again and again.
int MillisecondsUntil(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

bool IsMissing(const MeshOptions& options, const std::vector<Descriptor>& connected, int peer) {
  return peer != options.rank && !connected[peer].valid();
}

bool IsComplete(const MeshOptions& options, const std::vector<Descriptor>& connected) {
  for (int peer = 0; peer < options.size; ++peer) {
    if (IsMissing(options, connected, peer)) return false;
  }
  return true;
}

absl::Status LateError(const MeshOptions& options, const std::vector<Descriptor>& connected,
                       const Callers& callers, const Door& door) {
  std::vector<std::string> missing, notes;
  for (int peer = 0; peer < options.size; ++peer) {
    if (!IsMissing(options, connected, peer)) continue;
    missing.push_back(absl::StrCat("rank ", peer));
    if (peer < options.rank && !callers.trouble(peer).empty()) {
      notes.push_back(absl::StrCat("; last trouble with rank ", peer, ": ", callers.trouble(peer)));
    }
  }
  if (door.turned_away() > 0) {
    notes.push_back(
        absl::StrCat("; ", door.turned_away(), " connections of strangers were closed"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", options.rank, " of ", options.size,
                   " could not connect: ", absl::StrJoin(missing, ", "),
                   " did not connect in time; look at that process and at the "
                   "network between, or raise the timeout",
                   absl::StrJoin(notes, "")));
}

absl::StatusOr<std::vector<Descriptor>> Connect(const MeshOptions& options, const Identity& self,
                                                const std::vector<Address>& addresses,
                                                Listener& listener) {
  std::vector<Descriptor> connected(options.size);
  Callers callers(self, addresses);
  Door door(self, listener);
  std::vector<pollfd> polled;
  while (!IsComplete(options, connected)) {
    if (Clock::now() >= options.deadline) return LateError(options, connected, callers, door);
    polled.clear();
    callers.AddAwaited(polled);
    door.AddAwaited(polled);
    const Deadline next = std::min({options.deadline, callers.next_try(), door.next_expiry()});
    poll(polled.data(), polled.size(), MillisecondsUntil(next));
    std::span<const pollfd> events = polled;
    if (absl::Status status = callers.Advance(events, connected); !status.ok()) return status;
    if (absl::Status status = door.Advance(events, connected); !status.ok()) return status;
  }
  return connected;
}

}  // namespace

// The socket is opened only when all addresses are known: what waits at an open socket meanwhile
// would fill its queue, and a rank that comes too early tries again.
absl::StatusOr<std::vector<Descriptor>> ConnectMesh(const MeshOptions& options) {
  std::string secret;
  if (!options.key_file.empty()) {
    absl::StatusOr<std::string> read = ReadKeyFile(options.key_file);
    if (!read.ok()) return read.status();
    secret = *std::move(read);
  }
  absl::StatusOr<Listener> listener = Listener::Bind(options.address);
  if (!listener.ok()) return listener.status();
  const absl::StatusOr<Meeting> meeting = Meet({.rank = options.rank,
                                                .size = options.size,
                                                .store = options.store.get(),
                                                .prefix = options.prefix,
                                                .secret = secret,
                                                .address = listener->address(),
                                                .deadline = options.deadline});
  if (!meeting.ok()) return meeting.status();
  if (absl::Status status = listener->Open(); !status.ok()) return status;
  const Identity self{options.rank, options.size, meeting->key,
                      HmacSha256(options.prefix, options.digest)};
  return Connect(options, self, meeting->addresses, *listener);
}

}  // namespace thinwire
