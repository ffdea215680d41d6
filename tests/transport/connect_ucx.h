// Ranks as threads of one process, with Gloo's control planes and UCX's data planes.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "transport/planes.h"

namespace thinwire {

// Returns OK, or the reason why tests over UCX can't run here. With a sanitizer UCX counts as
// absent: the leak sanitizer's tracer sometimes crashes in a process that has loaded it, and the
// thread sanitizer can't see into it.
absl::Status UcxIsHere();

// Connect `world` ranks; the results are by rank.
std::vector<std::unique_ptr<DataPlane>> ConnectUcxPlanes(int world);
std::vector<Transport> ConnectUcxRanks(int world);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
