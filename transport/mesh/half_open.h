// Connections whose ends have not yet completed the challenge: HalfOpen is one of them. Callers
// holds those that a rank opens, one to each lower rank; Door holds those that arrive, from higher
// ranks and from strangers. Nothing here blocks or is thread-safe: the code that connects polls for
// both and hands each its part of the polled descriptors, in the order of AddAwaited.
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

// A non-blocking socket, which may still be connecting, and its challenge. It reads no byte beyond
// the challenge. Movable.
class HalfOpen {
 public:
  HalfOpen(Descriptor socket, Challenge challenge)
      : socket_(std::move(socket)),
        challenge_(std::move(challenge)),
        to_send_(challenge_.hello()) {}

  // Sends and receives what is possible now. After an error drop the connection. Errors: those of
  // Challenge::Take, Unavailable if the connection broke, NotFound if it was refused.
  absl::Status Advance();

  bool done() const { return to_send_.empty() && challenge_.awaited() == 0; }
  int peer() const { return challenge_.peer(); }
  pollfd awaited() const {
    return {socket_.fd(), to_send_.empty() ? short{POLLIN} : short{POLLOUT}, 0};
  }
  Descriptor Take() { return std::move(socket_); }

 private:
  absl::Status Send();     // as much as the socket accepts
  absl::Status Receive();  // as much of the awaited message as has arrived

  Descriptor socket_;
  Challenge challenge_;
  std::string to_send_;
  std::string received_;  // the part of the awaited message that has arrived
};

// The connections that a rank opens.
class Callers {
 public:
  // `addresses` by rank, and `self`, must outlive it.
  Callers(const Identity& self, const std::vector<Address>& addresses);

  // Adds the descriptors to wait for. next_try: the latest time of the next Advance.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_try() const;

  // Removes its part from the front of `polled`. Advances the connections that are ready, moves
  // completed ones into `connected`, by rank, and begins attempts that are due: a peer that refuses
  // or drops a connection is tried again. FailedPrecondition for a peer whose settings differ.
  absl::Status Advance(std::span<const pollfd>& polled, std::vector<Descriptor>& connected);

  // Why the last attempt with a peer failed; empty if none did.
  const std::string& trouble(int peer) const { return calls_[peer].trouble; }

  // True if nothing listens at the peer's address any more.
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

// The connections that arrive at a rank. A stranger can't delay the others: few connections are
// half open at a time, and none for long. When there is one too many, the oldest that has not
// proved the group's key is closed; a rank proves it at once, in its first message, so strangers
// can't crowd it out.
class Door {
 public:
  // `self` and `listener` must outlive it.
  Door(const Identity& self, Listener& listener) : self_(self), listener_(listener) {}

  // Adds the descriptors to wait for. next_expiry: the latest time of the next Advance.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_expiry() const;

  // Removes its part from the front of `polled`. Accepts waiting connections, advances those that
  // are ready, and moves completed ones into `connected`, by rank; a later connection from the same
  // rank replaces an earlier one. FailedPrecondition for a rank whose settings differ, Unavailable
  // if this process can't open another descriptor.
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
