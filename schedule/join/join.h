// Join: how a group comes together: from a place where its ranks find each other to everything that
// an engine requires. The C interface is one caller.
//
//   absl::StatusOr<Joined> joined = Join(options);
//   Engine::Create(joined->options, std::move(joined->transport), device);
#ifndef THINWIRE_SCHEDULE_JOIN_JOIN_H_
#define THINWIRE_SCHEDULE_JOIN_JOIN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compress/device.h"
#include "schedule/collective/settle.h"
#include "schedule/join/handshake.h"
#include "schedule/join/links.h"
#include "schedule/options.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

struct JoinOptions {
  int rank = 0;
  int size = 1;
  Options options;
  // The role of this rank. When members change, they form a new group in a fresh store, under the
  // same name or another; ranks compare the epoch, so the error names a rank that missed it.
  Member member = {};
  uint64_t epoch = 0;
  // The place where the ranks find each other: a store; or, for ranks that are threads of this
  // process, a common name (local_group). A group of one requires neither.
  std::shared_ptr<Store> store;
  std::string local_group;
  std::string group;               // the group's name, so that groups can share a store
  std::shared_ptr<Device> device;  // where tensors lie; null: the host
  // Options of the TCP connections: see GlooOptions.
  std::string interface;
  std::string rendezvous_host;
  std::string key_file;
  std::string congestion;
  // Paths; empty: searched for in the default places.
  std::string ucx_library, nccl_library;
};

struct Joined {
  Settled options;
  Transport transport;   // empty in a group of one
  std::string words;     // the data plane in words, such as "gloo over TCP"
  std::string topology;  // how dense allreduces go, such as "hierarchical: 2 nodes of 2 ranks"
  Nodes nodes;
  std::optional<LinkRates> rates;  // of the nodes' links, if they were measured
  Roster roster;                   // the members
};

// All ranks of the group must call it, each on its own thread. Returns within options.timeout and a
// short grace, and leaves nothing behind but its result. A rank that fails tells all connected
// ranks why, so all return the first reason: InvalidArgument for a value that is out of range or an
// interface that is not there; FailedPrecondition names the first rank that is set up differently,
// and in what; DeadlineExceeded names the ranks that did not come or stopped on the way;
// Unavailable names a rank that is gone; Unimplemented the first rank that lacks what the transport
// requires.
absl::StatusOr<Joined> Join(const JoinOptions& in);

// For a rank that fails before it can join: ranks that are in Join, or call it later, get the
// reason from the store and fail with Unavailable. A local group exists only while a rank waits in
// it. Reads rank, size, store, local_group and group of `in`, and returns the reason.
absl::Status FailToJoin(const JoinOptions& in, absl::Status why);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_JOIN_H_
