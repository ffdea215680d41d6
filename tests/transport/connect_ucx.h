// Ranks as threads of one process: Gloo's control planes beside UCX's data planes.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "transport/planes.h"

namespace thinwire {

// Why tests over UCX can't run here, or OK.
// With a sanitizer it counts as absent: the tracer of the leak sanitizer crashes now and then in a
// process that has loaded it, and the thread sanitizer can't see into it.
absl::Status UcxIsHere();

// By rank.
std::vector<std::unique_ptr<DataPlane>> ConnectUcxPlanes(int world);
std::vector<Transport> ConnectUcxRanks(int world);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
