// Door: the connections that come to a rank, those of higher ranks and of strangers.
#ifndef THINWIRE_TRANSPORT_MESH_DOOR_H_
#define THINWIRE_TRANSPORT_MESH_DOOR_H_

#include <poll.h>

#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "transport/mesh/half_open.h"
#include "transport/mesh/listener.h"
#include "transport/store.h"

namespace thinwire {

// Nothing here blocks, and a stranger holds up nobody: few connections are half open at a time, and
// none for long. When one too many comes, the oldest goes that has not shown the group's key; a
// rank shows it in its first message, at once, so strangers can't crowd it out. Not thread-safe.
class Door {
 public:
  // `self` and `listener` must outlive it.
  Door(const Identity& self, Listener& listener) : self_(self), listener_(listener) {}

  // Adds the descriptors to wait for. next_expiry: when to look again at the latest.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_expiry() const;

  // Takes its part of what was polled, which is as AddAwaited left it, off the front. Accepts who
  // waits, advances what is ready, and moves what is done into `connected`, by rank; a later
  // connection of a rank replaces an earlier one. FailedPrecondition for a rank that is set up in
  // another way, Unavailable if this process can open no descriptor.
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

#endif  // THINWIRE_TRANSPORT_MESH_DOOR_H_
