// Which of the kernel's congestion controls a connection runs.
//
// BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016) paces
// packets by timers, at the rate that it has seen. An allreduce sends bursts and waits for its
// peer, so that rate is often one that the link was not asked for, and between near ranks the
// timers cost more than the queues that they avoid. Reno (RFC 5681) is clocked by acknowledgements
// alone, needs many round trips after a loss, which near ranks have, and is built into every kernel
// and allowed to every user. docs/decisions/0035 has the figures.
#ifndef THINWIRE_TRANSPORT_MESH_CONGESTION_H_
#define THINWIRE_TRANSPORT_MESH_CONGESTION_H_

#include <string>

#include "absl/status/status.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

// `congestion` is "auto", which is also what an empty one means; "system": the kernel's default; or
// a name of the kernel's, such as "cubic".

// InvalidArgument names what this process may choose where it may not choose `congestion`.
absl::Status CheckCongestion(const std::string& congestion);

// Sets it on a TCP connection. "auto" replaces BBR by Reno where a round trip is short, and leaves
// everything else as it is. A kernel that does not let it stays with its default.
void SetCongestion(const Descriptor& connection, const std::string& congestion);

// What the connection runs, by the kernel's name; empty if the kernel does not say.
std::string CongestionOf(const Descriptor& connection);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_CONGESTION_H_
