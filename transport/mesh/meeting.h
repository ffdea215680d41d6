// Meeting: what ranks tell each other by the rendezvous store before they connect.
#ifndef THINWIRE_TRANSPORT_MESH_MEETING_H_
#define THINWIRE_TRANSPORT_MESH_MEETING_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/mesh.h"
#include "transport/mesh/tcp.h"

namespace thinwire {

struct Meeting {
  GroupKey key;
  std::vector<Address> addresses;  // by rank
};

// Rank 0 writes the group's token; all ranks write their address and the fingerprint of their key,
// and read those of the others. DeadlineExceeded names the rank that did not come,
// FailedPrecondition one with another key, on every rank that is affected. `secret` is that of the
// key file, empty if there is none; `listening` is where this rank listens.
absl::StatusOr<Meeting> Meet(const MeshOptions& options, const std::string& secret,
                             const Address& listening);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_MEETING_H_
