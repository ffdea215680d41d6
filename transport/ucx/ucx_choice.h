// How a group comes to run on UCX or not: alike on all ranks.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_
#define THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_

#include <string>

#include "absl/status/statusor.h"
#include "transport/transport.h"
#include "transport/transport_kind.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

// Puts UCX's data plane in the place of the transport's if `kind`, equal on all ranks, asks for it
// and all ranks can, and returns in words what runs. Where a rank can't, kUcx is Unimplemented on
// all ranks, and kAuto stays with the data plane that is there.
absl::StatusOr<std::string> ChooseDataPlane(TransportKind kind, const UcxOptions& options,
                                            Transport& transport);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_CHOICE_H_
