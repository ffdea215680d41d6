// Watch: which ranks have died while the group connects.
#ifndef THINWIRE_TRANSPORT_MESH_WATCH_H_
#define THINWIRE_TRANSPORT_MESH_WATCH_H_

#include <poll.h>

#include <chrono>
#include <span>
#include <vector>

#include "transport/mesh/address.h"
#include "transport/mesh/descriptor.h"
#include "transport/store.h"

namespace thinwire {

// A dead process is seen by what its system closes for it: a checked connection ends, and where it
// listened, connections are refused. Of a lower rank the callers see that. A higher one calls this
// rank, and who comes is unknown until it has proved its rank; so until then a line leads to where
// that rank listens, on which nothing is said, and which breaks when it dies. Nothing here blocks.
// Not thread-safe.
class Watch {
 public:
  // `addresses` by rank; they must outlive it.
  Watch(int rank, const std::vector<Address>& addresses);

  // Adds the descriptors to wait for; `connected` by rank. next_try: when to look again at the
  // latest.
  void AddAwaited(const std::vector<Descriptor>& connected, std::vector<pollfd>& polled);
  Deadline next_try() const;

  // Takes its part of what was polled, which is as AddAwaited left it, off the front.
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
  std::vector<int> polled_;  // the peers of what AddAwaited added, in its order
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_WATCH_H_
