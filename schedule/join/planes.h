// Decides if a group runs on NCCL or UCX in place of Gloo: alike on all ranks, by one
// procedure for both. Every rank offers what it has; if the offers go together, all connect, tell
// one another what came of it, and take the plane if all have succeeded.
#ifndef THINWIRE_SCHEDULE_JOIN_PLANES_H_
#define THINWIRE_SCHEDULE_JOIN_PLANES_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "schedule/options.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

struct ChoiceOptions {
  TransportKind kind = TransportKind::kGloo;  // equal on all ranks
  Deadline deadline;                          // as a Board's
  std::chrono::milliseconds timeout;          // as a Board's
  std::shared_ptr<Device> device = nullptr;   // where tensors lie; null: the host
  bool host_memory = false;  // the data plane must be one of the host's memory; equal on all ranks
  int local_size = 1;     // of nodes that are neighbours, if there are several; equal on all ranks
  std::string node = {};  // text that is equal for ranks of one node; empty: NodeIdentity()
  int loops = 1;          // of the transport's data plane, for the words; equal on all ranks
  // Connects these loops. It is called where the transport's data plane stays, for all ranks or
  // between nodes: connections that nobody uses would have to be closed on all ranks at one moment,
  // since one that closes is a lost peer.
  std::function<absl::Status()> connect_loops = nullptr;
  // Paths; empty: where they are looked for by themselves.
  std::string ucx_library = {}, nccl_library = {};
};

// Puts the data plane that `kind` asks for in the place of the transport's (as of Board), over
// which the ranks agree, if all of them can, and returns in words what runs. Where a rank can't,
// kUcx and kNccl are Unimplemented on all ranks; kAuto takes NCCL, else UCX, else UCX inside nodes
// and what is there between them, else what is there.
absl::StatusOr<std::string> ChooseDataPlane(const ChoiceOptions& options, Transport& transport);

// Text that is equal in two processes only if one can map the other's memory: the kernel's run, the
// namespaces, the user, and the folder of shared memory. Containers on one host differ, as a rule.
std::string HostIdentity();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_PLANES_H_
