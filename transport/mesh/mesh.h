// Mesh: an authenticated TCP connection to each other rank of a group.
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
  std::string prefix;    // of every key in the store, so that groups can share one
  Address address;       // to listen on, on any port
  std::string key_file;  // contains the group's key; empty: rank 0 puts a token into the store
  std::string digest;    // text that is equal on all ranks whose settings are the same
  Deadline deadline;     // for connecting to all ranks
};

// Fills `connections` with non-blocking sockets, by rank, none for this rank. Both ends have proved
// that they hold the group's key, which ranks they are, and that their settings are the same. No
// stranger's connection is among them, and nothing listens any more. DeadlineExceeded names the
// ranks that did not connect; Unavailable names, within moments, those that died after they had
// published their addresses; otherwise the errors of ReadKeyFile, Meet and Challenge. After a
// failure `connections` holds those that were completed by then.
absl::Status ConnectMesh(const MeshOptions& options, std::vector<Descriptor>& connections);

// The ranks exchange this through the rendezvous store before they connect.
struct Meeting {
  GroupKey key;
  std::vector<Address> addresses;  // by rank
};

// Rank 0 writes the group's token; all ranks write their address and the fingerprint of their key,
// and read those of the others. DeadlineExceeded names the rank that did not come.
// FailedPrecondition, on every rank that is affected, names a rank with another key. `secret` comes
// from the key file and is empty if there is none; `listening` is where this rank listens.
absl::StatusOr<Meeting> Meet(const MeshOptions& options, const std::string& secret,
                             const Address& listening);

// For a rank that fails before it has published its address: its peers read the reason in place of
// the address, and need not wait for their deadline. Returns the reason.
absl::Status NotComing(Store& store, const std::string& prefix, int rank, absl::Status why);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_MESH_H_
