// How a group comes to run on an optional data plane or not: alike on all ranks.
#ifndef THINWIRE_TRANSPORT_CHOICE_H_
#define THINWIRE_TRANSPORT_CHOICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "transport/store.h"
#include "transport/transport.h"
#include "transport/transport_kind.h"

namespace thinwire {

struct ChoiceOptions {
  TransportKind kind = TransportKind::kGloo;  // equal on all ranks
  Deadline deadline;
  std::shared_ptr<Device> device = nullptr;  // where tensors lie; null: the host
  bool host_memory = false;  // the data plane must be one of the host's memory; equal on all ranks
  int local_size = 1;  // of nodes that are neighbours, if there are several; equal on all ranks
  int loops = 1;       // of the transport's data plane, for the words; equal on all ranks
  // Paths; empty: where they are looked for by themselves.
  std::string ucx_library = {}, nccl_library = {};
};

// Puts the data plane that `kind` asks for in the place of the transport's (as of Board), over
// which the ranks agree, if all of them can, and returns in words what runs. Where a rank can't,
// kUcx and kNccl are Unimplemented on all ranks; kAuto takes NCCL, else UCX, else UCX inside nodes
// and what is there between them, else what is there.
absl::StatusOr<std::string> ChooseDataPlane(const ChoiceOptions& options, Transport& transport);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_CHOICE_H_
