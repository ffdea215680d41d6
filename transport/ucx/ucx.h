// UCX: a data plane on libucp, over the shared memory of one host, beside the control plane of
// another backend. It matches by tag, blocks, and uses host memory. No port is opened.
//
// The library is looked up at run time. If it is missing these functions return Unimplemented, and
// everything else works without it; a build without UCX's headers uses no_ucx.cc.
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
  TellAddress tell;             // among the members
  const ControlPlane& control;  // reports lost peers; may have more ranks than the plane
  int first = 0;                // rank 0 of the members has this rank in `control`
  std::string library{};        // path of libucp.so.0; empty: where the dynamic linker looks
  Deadline deadline;            // for connecting to all ranks
};

// The library's version, such as "1.13.1". Unimplemented, with the fix, if it is missing or too
// old.
absl::StatusOr<std::string> UcxVersion(const std::string& library);

// Returns a plane that has exchanged a block with every rank; all ranks share one host's memory.
// UCX does not notice lost peers: code that combines it with a control plane must pass that plane's
// failure on by Abort. Unimplemented if this rank or another can't take part; DeadlineExceeded
// names the ranks that did not come; Unavailable names one that died meanwhile.
absl::StatusOr<std::unique_ptr<DataPlane>> ConnectUcx(const UcxOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_H_
