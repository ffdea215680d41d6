// Join: how a group comes together, from nothing but a place where its ranks find each other to
// what an engine needs. Anybody may call it; the C interface is one caller.
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
  // The role of this rank. Members that change form a group anew, under the same or
  // another name in a fresh place; the epoch is compared, so a rank that missed the change is
  // refused by name.
  Member member = {};
  uint64_t epoch = 0;
  // Where the ranks find each other: a store; or, for ranks that are threads of this process, a
  // name that all of them give. A group of one needs neither.
  std::shared_ptr<Store> store;
  std::string local_group;
  std::string group;               // its name, so that groups can share a store
  std::shared_ptr<Device> device;  // where tensors lie; null: the host
  // Options of the TCP connections: see GlooOptions.
  std::string interface;
  std::string rendezvous_host;
  std::string key_file;
  std::string congestion;
  // Paths; empty: where they are looked for by themselves.
  std::string ucx_library, nccl_library;
};

struct Joined {
  Settled options;
  Transport transport;   // empty in a group of one
  std::string words;     // what the data runs on, such as "gloo over TCP"
  std::string topology;  // the way of dense allreduces, such as "hierarchical: 2 nodes of 2 ranks"
  Nodes nodes;
  std::optional<LinkRates> rates;  // of the nodes' links, if they were measured
  Roster roster;                   // who the members are
};

// All ranks of the group call it, each on a thread of its own. It returns within options.timeout
// and a short grace; afterwards nothing of it is left but what it returns. A rank that fails tells
// all others why, as far as they are connected, so the first reason is everybody's:
// InvalidArgument for a value that is out of range or an interface that is not there;
// FailedPrecondition names the first rank that is set up otherwise, and in what;
// DeadlineExceeded names the ranks that did not come or stopped on the way;
// Unavailable names a rank that is gone; Unimplemented the first rank that has not what the
// transport needs.
absl::StatusOr<Joined> Join(const JoinOptions& in);

// For a rank that fails before it can join: the ranks that are in Join, or come later, are told why
// where they meet, and fail with Unavailable. A local group is there only while a rank waits in it.
// It reads rank, size, store, local_group and group of `in`, and returns the reason.
absl::Status FailToJoin(const JoinOptions& in, absl::Status why);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_JOIN_H_
