// Which of the kernel's congestion controls a connection runs.
//
// BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016) paces
// packets by timers, at the rate that it has seen. An allreduce sends bursts and waits for its
// peer, so that rate is often one that the link was not asked for, and between near ranks the
// timers cost more than the queues that they avoid. Reno (RFC 5681) is clocked by acknowledgements
// alone, needs many round trips after a loss, which near ranks have, and is built into every kernel
// and allowed to every user. But it fills the queue before a slow link, and begins slowly again
// after each pause (RFC 5681, 4.1): whoever begins later then waits for acknowledgements behind the
// other's queue. So where the queue makes the round trip long, the connection goes back to BBR.
// docs/decisions/0035 has the figures.
#ifndef THINWIRE_TRANSPORT_MESH_CONGESTION_H_
#define THINWIRE_TRANSPORT_MESH_CONGESTION_H_

#include <linux/tcp.h>

#include <string>

#include "absl/status/status.h"

namespace thinwire {

// `congestion` is "auto", which is also what an empty one means; "system": the kernel's default; or
// a name of the kernel's, such as "cubic".

// InvalidArgument names what this process may choose where it may not choose `congestion`.
absl::Status CheckCongestion(const std::string& congestion);

// What a TCP socket runs, by the kernel's name; empty if the kernel does not say.
std::string CongestionOf(int socket);

// Whether so much is under way that it waits in a queue, before a link that carries less than what
// Reno is better for.
bool IsBehindAQueue(const tcp_info& info);

// The control of one connected TCP socket, which stays its owner's. Not thread-safe.
class Congestion {
 public:
  // "auto" replaces BBR by Reno where a round trip is short, and leaves everything else as it is. A
  // kernel that does not let it stays with its default.
  Congestion(int socket, const std::string& congestion);

  // Whenever bytes came or left, so that what "auto" replaced can come back.
  void OnProgress() {
    if (replaced_ && ++events_ % kLook == 0) Look();
  }

 private:
  static constexpr unsigned kLook = 8;  // events; looking takes about a microsecond
  // Looks in a row: a fast link is slow for a moment when a peer's processor is busy.
  static constexpr unsigned kConvinced = 3;

  void Look();

  const int socket_;
  bool replaced_ = false;
  unsigned events_ = 0, queued_ = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_CONGESTION_H_
