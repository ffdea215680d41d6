// UCX: a data plane on libucp, over the shared memory of one host, beside the control plane of
// another backend. It matches by tag, blocks, and works on host memory. No port is opened.
//
// The library is looked for at run time. Where it is missing these functions return Unimplemented,
// and nothing else changes; a build without UCX's headers has no_ucx.cc in their place.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_H_
#define THINWIRE_TRANSPORT_UCX_UCX_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/membership.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

struct UcxOptions {
  Membership members;           // the plane's ranks
  TellAddress tell;             // among them
  const ControlPlane& control;  // where this rank hears of lost peers; of these ranks and others
  int first = 0;                // the control plane's rank of the members' rank 0
  std::string library{};        // path of libucp.so.0; empty: where the dynamic linker looks
  Deadline deadline;            // for the whole connecting
};

// The library's version, such as "1.13.1". Unimplemented, with the fix, if it is not here or is
// too old.
absl::StatusOr<std::string> UcxVersion(const std::string& library);

// A plane that has exchanged a block with every rank; all of them share one host's memory. It
// does not hear of lost peers: whoever combines it with a control plane passes that plane's failure
// on by Abort. Unimplemented if this rank or another can't take part, DeadlineExceeded names the
// ranks that did not come, Unavailable one that died meanwhile.
absl::StatusOr<std::unique_ptr<DataPlane>> ConnectUcx(const UcxOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_H_
