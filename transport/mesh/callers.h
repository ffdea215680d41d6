// Callers: the connections that a rank makes, one to each lower rank.
#ifndef THINWIRE_TRANSPORT_MESH_CALLERS_H_
#define THINWIRE_TRANSPORT_MESH_CALLERS_H_

#include <poll.h>

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/mesh/address.h"
#include "transport/mesh/half_open.h"
#include "transport/store.h"

namespace thinwire {

// Nothing here blocks. Not thread-safe.
class Callers {
 public:
  // `addresses` by rank, and `self`, must outlive it.
  Callers(const Identity& self, const std::vector<Address>& addresses);

  // Adds the descriptors to wait for. next_try: when to look again at the latest.
  void AddAwaited(std::vector<pollfd>& polled) const;
  Deadline next_try() const;

  // Takes its part of what was polled, which is as AddAwaited left it, off the front. Advances what
  // is ready, moves what is done into `connected`, by rank, and begins attempts that are due: a
  // peer that refuses or drops a connection is tried again. FailedPrecondition for one that is set
  // up in another way.
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

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_CALLERS_H_
