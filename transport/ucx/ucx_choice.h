// Whether a group can run on UCX: decided alike on all ranks.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_
#define THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_

#include "absl/status/statusor.h"
#include "transport/chosen_plane.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

// UCX's data plane if all ranks can, which share one host's memory; else Unimplemented on all.
absl::StatusOr<ChosenPlane> ChooseUcx(const UcxOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_
