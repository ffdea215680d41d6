#include "transport/mesh/mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/half_open.h"
#include "transport/mesh/tcp.h"
#include "transport/store.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

// For lines see Watch. By the time of the first line most ranks have called. A line that its other
// end has closed, as it does with silent connections, is opened again. So is an old one: if its
// rank died, the news may be lost, since a reset is sent only once, a listener's queue dies without
// a reset, and a connection on which nothing is sent retransmits nothing.
constexpr milliseconds kFirstLine{20}, kFirstPause{2}, kLongestPause{200}, kOldAge{1000};

int ErrorOf(int socket) {
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

// Watch finds out which ranks have died while the group connects.
//
// The system closes the sockets of a dead process: its authenticated connection ends, and its
// listener refuses connections. Callers notices both for lower ranks. A higher rank calls this one,
// and an incoming connection has no rank until it has proved one; so until then this rank keeps a
// line, a silent connection to that rank's listener, which breaks when the rank dies.
class Watch {
 public:
  // `addresses` by rank; they must outlive it.
  Watch(int rank, const std::vector<Address>& addresses);

  // Adds the descriptors to wait for; `connected` by rank. next_try: the latest time of the next
  // Advance.
  void AddAwaited(const std::vector<Descriptor>& connected, std::vector<pollfd>& polled);
  Deadline next_try() const;

  // Removes its part, in the order of AddAwaited, from the front of `polled`.
  void Advance(std::span<const pollfd>& polled, const std::vector<Descriptor>& connected);

  bool is_gone(int peer) const { return peers_[peer].gone; }
  void SetGone(int peer) { peers_[peer].gone = true; }  // its callers were refused

 private:
  struct Peer {
    Descriptor line;
    Deadline next_try;
    std::chrono::milliseconds pause;
    bool gone = false;
  };

  void Begin(Peer& peer, const Address& address);
  void OnBroken(Peer& peer, int error);

  const int rank_;
  const std::vector<Address>& addresses_;
  std::vector<Peer> peers_;
  std::vector<int> polled_;  // peers of the descriptors that AddAwaited added, in order
};

Watch::Watch(int rank, const std::vector<Address>& addresses)
    : rank_(rank), addresses_(addresses), peers_(addresses.size()) {
  for (Peer& peer : peers_) {
    peer.next_try = Clock::now() + kFirstLine;
    peer.pause = kFirstPause;
  }
}

void Watch::AddAwaited(const std::vector<Descriptor>& connected, std::vector<pollfd>& polled) {
  polled_.clear();
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
    Peer& peer = peers_[number];
    if (connected[number].valid()) peer.line = Descriptor();
    const Descriptor& watched = connected[number].valid() ? connected[number] : peer.line;
    if (peer.gone || !watched.valid()) continue;
    polled.push_back({watched.fd(), POLLRDHUP, 0});
    polled_.push_back(number);
  }
}

Deadline Watch::next_try() const {
  Deadline first = Deadline::max();
  for (size_t number = rank_ + 1; number < peers_.size(); ++number) {
    const Peer& peer = peers_[number];
    if (!peer.gone) first = std::min(first, peer.next_try);
  }
  return first;
}

void Watch::Advance(std::span<const pollfd>& polled, const std::vector<Descriptor>& connected) {
  for (const int number : polled_) {
    const pollfd event = polled.front();
    polled = polled.subspan(1);
    if (event.revents == 0) continue;
    Peer& peer = peers_[number];
    if (event.fd != peer.line.fd()) {
      peer.gone = true;
    } else if (!connected[number].valid()) {
      OnBroken(peer, ErrorOf(event.fd));
    }
  }
  for (size_t number = rank_ + 1; number < peers_.size(); ++number) {
    Peer& peer = peers_[number];
    if (peer.gone || Clock::now() < peer.next_try) continue;
    if (connected[number].valid()) {
      peer.next_try = Deadline::max();
    } else {
      Begin(peer, addresses_[number]);
    }
  }
}

void Watch::Begin(Peer& peer, const Address& address) {
  peer.next_try = Clock::now() + kOldAge;
  peer.line = Descriptor(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!peer.line.valid() || (connect(peer.line.fd(), address.get(), address.length) != 0 &&
                             errno != EINPROGRESS && errno != EINTR)) {
    OnBroken(peer, errno);
  }
}

void Watch::OnBroken(Peer& peer, int error) {
  peer.gone = error == ECONNREFUSED;
  peer.line = Descriptor();
  peer.next_try = Clock::now() + peer.pause;
  peer.pause = std::min(peer.pause * 2, kLongestPause);
}

// A rank that gives up closes its connections, and must not be taken for the one that died: so it
// waits until all others have noticed that one.
constexpr milliseconds kLinger(50);

// For poll. Rounded up, so that a deadline in less than 1 ms does not cause a busy loop.
int MillisecondsUntil(Deadline deadline) {
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

// True if all ranks that this one still waits for are dead. While one of them is merely silent, the
// dead ones may have given up because of it, and DeadlineExceeded will name it.
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
                   "connections, whether THINWIRE_IFACE names the right interface, and whether the "
                   "rendezvous store holds keys of an earlier run"));
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

constexpr char kToken[] = "mesh/token";

// The value of `rank`'s key in the store.
absl::StatusOr<std::string> Read(const MeshOptions& options, const std::string& key, int rank) {
  absl::StatusOr<std::string> value =
      GetOfPeer(*options.store, absl::StrCat(options.prefix, key), rank,
                {options.rank, options.size}, options.deadline);
  if (value.ok() || !absl::IsDeadlineExceeded(value.status())) return value;
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", options.rank, " of ", options.size, " could not connect: rank ", rank,
      " did not come; start it, or raise the timeout (", value.status().message(), ")"));
}

absl::StatusOr<std::string> Token(const MeshOptions& options) {
  if (options.rank != 0) return Read(options, kToken, 0);
  std::string token = MakeToken();
  const absl::Status set = options.store->Set(absl::StrCat(options.prefix, kToken), token);
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

// The socket listens before its address is published, so a refused connection means a dead rank.
// Strangers that connect before all addresses are known wait in its queue; if they fill it, a
// rank's connection is a second late.
absl::Status ConnectMesh(const MeshOptions& options, std::vector<Descriptor>& connections) {
  connections = std::vector<Descriptor>(options.size);
  std::string secret;
  if (!options.key_file.empty()) {
    absl::StatusOr<std::string> read = ReadKeyFile(options.key_file);
    if (!read.ok()) return NotComing(*options.store, options.prefix, options.rank, read.status());
    secret = *std::move(read);
  }
  absl::StatusOr<Listener> listener = Listener::Open(options.address);
  if (!listener.ok()) {
    return NotComing(*options.store, options.prefix, options.rank, listener.status());
  }
  const absl::StatusOr<Meeting> meeting = Meet(options, secret, listener->address());
  if (!meeting.ok()) return meeting.status();
  const Identity self{options.rank, options.size, meeting->key,
                      HmacSha256(options.prefix, options.digest)};
  return Connect(options, self, meeting->addresses, *listener, connections);
}

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

absl::Status NotComing(Store& store, const std::string& prefix, int rank, absl::Status why) {
  if (rank == 0) why = SetFailure(store, absl::StrCat(prefix, kToken), std::move(why));
  return SetFailure(store, absl::StrCat(prefix, "mesh/", rank), std::move(why));
}

}  // namespace thinwire
