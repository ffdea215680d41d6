// Decides whether a group runs on NCCL or UCX in place of Gloo: alike on all ranks, by the same
// procedure for both. Every rank offers what it has; if the offers match, all connect, tell one
// another the outcome, and use the plane if all have succeeded.
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
  bool host_memory = false;  // the data plane must move host memory; equal on all ranks
  int local_size = 1;        // ranks per node, if there are several nodes; equal on all ranks
  std::string node = {};     // text that is equal for ranks of one node; empty: NodeIdentity()
  int loops = 1;             // of the transport's data plane, for the words; equal on all ranks
  // Connects these loops. Called only if the transport's data plane stays in use, for all ranks or
  // between nodes: unused connections would have to be closed on all ranks at the same moment,
  // since a closed connection counts as a lost peer.
  std::function<absl::Status()> connect_loops = nullptr;
  // Paths; empty: searched for in the default places.
  std::string ucx_library = {}, nccl_library = {};
};

// Replaces the data plane of `transport` (as in Board), over which the ranks agree, by the one that
// `kind` asks for, if all ranks can use it, and describes the result in words. If a rank can't,
// kUcx and kNccl return Unimplemented on all ranks; kAuto takes NCCL, else UCX, else UCX inside
// nodes and the transport's own plane between them, else the transport's own.
absl::StatusOr<std::string> ChooseDataPlane(const ChoiceOptions& options, Transport& transport);

// Text that is equal in two processes only if one can map the other's memory: boot id, namespaces,
// user, and the shared-memory folder. Containers on one host usually differ.
std::string HostIdentity();

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_PLANES_H_
