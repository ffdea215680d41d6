// NCCL: a data plane on libnccl between GPUs, beside the control plane of another backend. It
// matches by order, ends by events, and its blocks lie in device memory.
//
// The library is looked up at run time (nccl_library.h). If it is missing these functions return
// Unimplemented; everything else works without it.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/membership.h"
#include "transport/nccl/nccl_library.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

struct NcclOptions {
  Membership members;
  TellAddress tell;                // among the members; rank 0 passes NCCL's unique id
  const ControlPlane& control;     // reports lost peers to this rank
  std::string library;             // path of libnccl.so.2; empty: the order of nccl_library.h
  Deadline deadline;               // for connecting to all ranks
  std::shared_ptr<Device> device;  // blocks lie in its memory
  int most_ctas = kNcclDefault;    // as for NcclComm::Make; equal on all ranks
};

// The library's version, such as "2.30.7". Unimplemented, with the fix, if it is missing or too
// old.
absl::StatusOr<std::string> NcclVersion(const std::string& library);

// Returns a plane that has exchanged a block with every rank. Exchanges that are started on it run
// on a stream of its own; StreamPlane::On gives planes for other streams. An exchange ends as soon
// as it is queued, and a Flush when it is done.
//
// The callers must find sizes that disagree between two ranks before they start: NCCL may hang or
// write past the end. NCCL does not notice every lost peer: code that combines the plane with a
// control plane must pass that plane's failure on by Abort.
//
// Unimplemented if this rank or another can't take part; DeadlineExceeded if ranks did not come;
// Unavailable names one that died meanwhile.
absl::StatusOr<std::unique_ptr<StreamPlane>> ConnectNccl(const NcclOptions& options);

// Like ConnectNccl, for ranks that already share a unique id. control: reports lost peers to this
// rank; if null, lost peers are awaited until the deadline. most_ctas: as for NcclComm::Make.
absl::StatusOr<std::unique_ptr<StreamPlane>> JoinNccl(std::shared_ptr<const NcclLibrary> nccl,
                                                      Membership members, const NcclUniqueId& id,
                                                      std::shared_ptr<Device> device,
                                                      Deadline deadline,
                                                      const ControlPlane* control = nullptr,
                                                      int most_ctas = kNcclDefault);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_H_
