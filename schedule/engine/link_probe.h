// ProbeLinks: how fast ranks send inside nodes and between them, measured before anything else is
// on the links.
#ifndef THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_
#define THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_

#include "absl/status/statusor.h"
#include "schedule/collective/grid.h"
#include "schedule/collective/hierarchy.h"
#include "transport/data_plane.h"

namespace thinwire {

// The rates of the slowest ranks, the same on all, which all call it. The plane is of the host's
// memory. Takes ten exchanges of 64 KiB a rank, and, where these take less than 10 ms, six of 1
// MiB.
absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, DataPlane& plane, Deadline deadline);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LINK_PROBE_H_
