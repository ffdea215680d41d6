// Connections whose two ends are still proving to each other who they are: HalfOpen is one of them.
// Callers has those that a rank makes, one to each lower rank; Door those that come to it, of
// higher ranks and of strangers. Nothing here blocks, and nothing is thread-safe: who connects
// polls for both, and gives each its part of what was polled, which is as AddAwaited left it.
#ifndef THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_
#define THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "transport/mesh/challenge.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/tcp.h"
#include "transport/store.h"

namespace thinwire {

// A socket that never blocks, which may still be connecting, with its challenge. It reads no byte
// beyond the challenge. Movable.
class HalfOpen {
 public:
  HalfOpen(Descriptor socket, Challenge challenge)
      : socket_(std::move(socket)),
        challenge_(std::move(challenge)),
        to_send_(challenge_.hello()) {}

  // Sends and takes what is possible now. After an error the connection is to be dropped: those of
  // Challenge::Take, Unavailable if the connection broke, NotFound if it was refused.
  absl::Status Advance();

  bool done() const { return to_send_.empty() && challenge_.awaited() == 0; }
  int peer() const { return challenge_.peer(); }
  pollfd awaited() const {
    return {socket_.fd(), to_send_.empty() ? short{POLLIN} : short{POLLOUT}, 0};
  }
  Descriptor Take() { return std::move(socket_); }

 private:
  absl::Status Send();     // as much as the socket takes
  absl::Status Receive();  // as much as there is of the message awaited

  Descriptor socket_;
  Challenge challenge_;
  std::string to_send_;
  std::string received_;  // of the message awaited
};

// The connections that a rank makes.
class Callers {
 public:
  // `addresses` by rank, and `self`, must outlive it.
  Callers(const Identity& self, const std::vector<Address>& addresses);

  // Adds the descriptors to wait for. next_try: when to look again at the latest.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_try() const;

  // Takes its part off the front of what was polled. Advances what is ready, moves what is done
  // into `connected`, by rank, and begins attempts that are due: a peer that refuses or drops a
  // connection is tried again. FailedPrecondition for one that is set up in another way.
  absl::Status Advance(std::span<const pollfd>& polled, std::vector<Descriptor>& connected);

  // Why the last attempt with a peer failed; empty if none did.
  const std::string& trouble(int peer) const { return calls_[peer].trouble; }

  // Nobody listens at the peer's address any more.
  bool refused(int peer) const { return calls_[peer].refused; }

 private:
  struct Call {
    std::optional<HalfOpen> attempt;
    Deadline next_try;
    std::chrono::milliseconds pause;
    bool done = false, refused = false;
    std::string trouble;
  };

  absl::Status Advance(int peer, std::vector<Descriptor>& connected);
  void Begin(int peer);
  void TryLater(Call& call, const absl::Status& why);

  const Identity& self_;
  const std::vector<Address>& addresses_;
  std::vector<Call> calls_;
};

// The connections that come to a rank. A stranger holds up nobody: few connections are half open at
// a time, and none for long. When one too many comes, the oldest goes that has not shown the
// group's key; a rank shows it in its first message, at once, so strangers can't crowd it out.
class Door {
 public:
  // `self` and `listener` must outlive it.
  Door(const Identity& self, Listener& listener) : self_(self), listener_(listener) {}

  // Adds the descriptors to wait for. next_expiry: when to look again at the latest.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_expiry() const;

  // Takes its part off the front of what was polled. Accepts who waits, advances what is ready, and
  // moves what is done into `connected`, by rank; a later connection of a rank replaces an earlier
  // one. FailedPrecondition for a rank that is set up in another way, Unavailable if this process
  // can open no descriptor.
  absl::Status Advance(std::span<const pollfd>& polled, std::vector<Descriptor>& connected);

  uint64_t turned_away() const { return turned_away_; }

 private:
  struct Guest {
    HalfOpen connection;
    Deadline until;
  };

  absl::Status AdvanceGuests(std::span<const pollfd> polled, std::vector<Descriptor>& connected);
  absl::Status Admit();
  absl::Status MakeRoom();

  const Identity& self_;
  Listener& listener_;
  std::list<Guest> guests_;  // the oldest first
  uint64_t turned_away_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_
