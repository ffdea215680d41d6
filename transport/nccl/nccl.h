// NCCL: a data plane on libnccl between GPUs, beside the control plane of another backend. It
// matches by order, ends by events, and its blocks are a device's.
//
// The library is looked for at run time (nccl_library.h). Where it is missing these functions
// return Unimplemented, and nothing else changes.
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
  TellAddress tell;                // among them; NCCL's unique id is rank 0's address
  const ControlPlane& control;     // where this rank hears of lost peers
  std::string library;             // path of libnccl.so.2; empty: the order of nccl_library.h
  Deadline deadline;               // for the whole connecting
  std::shared_ptr<Device> device;  // whose blocks are exchanged
  int most_ctas = kNcclDefault;    // as for NcclComm::Make; equal on all ranks
};

// The library's version, such as "2.30.7". Unimplemented, with the fix, if it is not here or is
// too old.
absl::StatusOr<std::string> NcclVersion(const std::string& library);

// A plane that has exchanged a block with every rank. Exchanges that are started on it are work of
// a stream of its own; those of other streams go by StreamPlane::On. An exchange ends as soon as it
// is queued, and a Flush when it is done.
//
// Sizes that disagree between two ranks are for the callers to find, before they start: NCCL may
// hang or write on. It does not hear of every lost peer: whoever combines the plane with a control
// plane passes that plane's failure on by Abort.
//
// Unimplemented if this rank or another can't take part, DeadlineExceeded if ranks did not come,
// Unavailable names one that died meanwhile.
absl::StatusOr<std::unique_ptr<StreamPlane>> ConnectNccl(const NcclOptions& options);

// As ConnectNccl, for ranks that have a unique id in common already. control: where this rank hears
// of lost peers; null: nowhere, so that they are awaited until the deadline. most_ctas: as for
// NcclComm::Make.
absl::StatusOr<std::unique_ptr<StreamPlane>> JoinNccl(std::shared_ptr<const NcclLibrary> nccl,
                                                      Membership members, const NcclUniqueId& id,
                                                      std::shared_ptr<Device> device,
                                                      Deadline deadline,
                                                      const ControlPlane* control = nullptr,
                                                      int most_ctas = kNcclDefault);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_H_
