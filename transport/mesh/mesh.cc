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
#include "transport/mesh/watch.h"

namespace thinwire {
namespace {

// A rank that gives up closes its connections, and must not be taken for the one that died: so it
// waits until all others have seen that one.
constexpr std::chrono::milliseconds kLinger(50);

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
        absl::StrCat("; ", door.turned_away(), " connections that proved nothing were closed"));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", options.rank, " of ", options.size,
                   " could not connect: ", absl::StrJoin(missing, ", "),
                   " did not connect in time; look at that process and at the "
                   "network between, or raise the timeout",
                   absl::StrJoin(notes, "")));
}

// True if all that this rank still waits for are dead. While one of them is merely silent, those
// that are gone may have given up for its sake, and the deadline will name it.
bool WaitsForTheDeadOnly(const MeshOptions& options, const std::vector<Descriptor>& connected,
                         const Watch& watch) {
  bool somebody = false;
  for (int peer = 0; peer < options.size; ++peer) {
    somebody = somebody || watch.is_gone(peer);
    if (IsMissing(options, connected, peer) && !watch.is_gone(peer)) return false;
  }
  return somebody;
}

absl::Status GoneError(const MeshOptions& options, const std::vector<Address>& addresses,
                       const Watch& watch) {
  std::vector<std::string> gone;
  for (int peer = 0; peer < options.size; ++peer) {
    if (!watch.is_gone(peer)) continue;
    gone.push_back(absl::StrCat("rank ", peer, " is gone (it was at ", addresses[peer].Host(),
                                " port ", addresses[peer].Port(), ")"));
  }
  return absl::UnavailableError(
      absl::StrCat("rank ", options.rank, " of ", options.size,
                   " could not connect: ", absl::StrJoin(gone, ", "),
                   "; look why that process ended, or, if it runs, whether a firewall refuses "
                   "connections and whether THINWIRE_IFACE names the right interface"));
}

absl::Status Connect(const MeshOptions& options, const Identity& self,
                     const std::vector<Address>& addresses, Listener& listener,
                     std::vector<Descriptor>& connected) {
  Callers callers(self, addresses);
  Door door(self, listener);
  Watch watch(options.rank, addresses);
  Deadline give_up = Deadline::max();
  std::vector<pollfd> polled;
  while (!IsComplete(options, connected)) {
    if (Clock::now() >= options.deadline) return LateError(options, connected, callers, door);
    if (Clock::now() >= give_up) return GoneError(options, addresses, watch);
    polled.clear();
    callers.AddAwaited(polled);
    door.AddAwaited(polled);
    watch.AddAwaited(connected, polled);
    const Deadline next = std::min(
        {options.deadline, give_up, callers.next_try(), door.next_expiry(), watch.next_try()});
    poll(polled.data(), polled.size(), MillisecondsUntil(next));
    std::span<const pollfd> events = polled;
    if (absl::Status status = callers.Advance(events, connected); !status.ok()) return status;
    if (absl::Status status = door.Advance(events, connected); !status.ok()) return status;
    watch.Advance(events, connected);
    for (int peer = 0; peer < options.rank; ++peer) {
      if (callers.refused(peer)) watch.SetGone(peer);
    }
    if (!WaitsForTheDeadOnly(options, connected, watch)) {
      give_up = Deadline::max();
    } else if (give_up == Deadline::max()) {
      give_up = Clock::now() + kLinger;
    }
  }
  return absl::OkStatus();
}

}  // namespace

// The socket listens before its address is told, so that a refused connection means a dead rank.
// Strangers that come before all addresses are known wait in its queue; where they fill it, a
// rank's connection is a second late.
absl::Status ConnectMesh(const MeshOptions& options, std::vector<Descriptor>& connections) {
  connections = std::vector<Descriptor>(options.size);
  std::string secret;
  if (!options.key_file.empty()) {
    absl::StatusOr<std::string> read = ReadKeyFile(options.key_file);
    if (!read.ok()) return read.status();
    secret = *std::move(read);
  }
  absl::StatusOr<Listener> listener = Listener::Open(options.address);
  if (!listener.ok()) return listener.status();
  const absl::StatusOr<Meeting> meeting = Meet({.rank = options.rank,
                                                .size = options.size,
                                                .store = options.store.get(),
                                                .prefix = options.prefix,
                                                .secret = secret,
                                                .address = listener->address(),
                                                .deadline = options.deadline});
  if (!meeting.ok()) return meeting.status();
  const Identity self{options.rank, options.size, meeting->key,
                      HmacSha256(options.prefix, options.digest)};
  return Connect(options, self, meeting->addresses, *listener, connections);
}

}  // namespace thinwire
