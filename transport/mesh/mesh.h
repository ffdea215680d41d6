// Mesh: a checked TCP connection with each other rank of a group.
#ifndef THINWIRE_TRANSPORT_MESH_MESH_H_
#define THINWIRE_TRANSPORT_MESH_MESH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/mesh/descriptor.h"
#include "transport/mesh/group_key.h"
#include "transport/mesh/tcp.h"
#include "transport/store.h"

namespace thinwire {

struct MeshOptions {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;
  std::string prefix;    // before every key in the store, so that groups can share one
  Address address;       // where to listen, on any port
  std::string key_file;  // of the group's key; empty: rank 0 puts a token into the store
  std::string digest;    // text that is equal on all ranks that are set up alike
  Deadline deadline;     // for the whole connecting
};

// Fills `connections`, by rank, none at the own one; they do not block. Both ends have proved that
// they hold the group's key, which ranks they are, and that they are set up alike. Nobody else's
// connection is among them, and nothing listens any more. DeadlineExceeded names the ranks that did
// not connect, Unavailable, within moments, those that died since they told their addresses;
// otherwise the errors of ReadKeyFile, Meet and Challenge. After a failure those are filled in that
// were connected by then.
absl::Status ConnectMesh(const MeshOptions& options, std::vector<Descriptor>& connections);

// The ranks tell each other this by the rendezvous store before they connect.
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

// For a rank that fails before it has told its address: its peers read why in place of it, and
// need not wait for their deadline. Returns the reason.
absl::Status NotComing(Store& store, const std::string& prefix, int rank, absl::Status why);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_MESH_H_
