// Whether a group can run on NCCL: decided alike on all ranks.
#ifndef THINWIRE_TRANSPORT_NCCL_NCCL_CHOICE_H_
#define THINWIRE_TRANSPORT_NCCL_NCCL_CHOICE_H_

#include "absl/status/statusor.h"
#include "transport/chosen_plane.h"
#include "transport/nccl/nccl.h"

namespace thinwire {

// NCCL's data plane if all ranks have the same version of it and a GPU of their own (the device may
// be null here); else Unimplemented on all.
absl::StatusOr<ChosenPlane> ChooseNccl(const NcclOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_NCCL_NCCL_CHOICE_H_
