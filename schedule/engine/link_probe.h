// ProbeLinks: how fast ranks send inside nodes and between them, measured before anything else is
// on the links.
#ifndef THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_
#define THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_

#include <chrono>

#include "absl/status/statusor.h"
#include "schedule/collective/grid.h"
#include "schedule/collective/hierarchy.h"
#include "transport/transport.h"

namespace thinwire {

// The rates of the slowest ranks, the same on all, which all call it. The data plane is of the
// host's memory, and fails with the control plane. Takes ten exchanges of 64 KiB a rank, and, where
// these take less than 10 ms, six of 1 MiB. DeadlineExceeded names the ranks that do not answer
// when the first rank's deadline has passed, and are given a 30th of `timeout` to do so.
absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, Transport& transport, Deadline deadline,
                                     std::chrono::milliseconds timeout);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_
