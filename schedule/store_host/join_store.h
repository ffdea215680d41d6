// JoinStore: from a place to meet and a rank to a MessagePlane between the workers and the servers.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_JOIN_STORE_H_
#define THINWIRE_SCHEDULE_STORE_HOST_JOIN_STORE_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/messages/message_plane.h"
#include "transport/store.h"

namespace thinwire {

struct StorePlace {
  int rank = 0;  // the workers of the start come first, then servers, then workers that come later
  int workers = 1, servers = 1;
  // One of the two: a board on which members find each other, for ZeroMQ over TCP; or a name under
  // which members that are threads of this process meet.
  std::shared_ptr<Store> store;
  std::string local_group;
  std::string group;                       // prefix of keys in `store`, which may be used once
  std::string key_file;                    // the secret of the store; empty: a token in `store`
  std::string interface, rendezvous_host;  // where a server listens
  std::string zmq_library;
  std::chrono::milliseconds timeout{60000};
  // A server with a journal. One that has been there before gives its run and the port under which
  // workers call it.
  bool has_journal = false;
  std::string former_run = {};
  int former_port = 0;
  absl::Status journal_failure = {};  // why it can't be used

  bool is_server() const { return rank >= workers && rank < workers + servers; }
};

struct StoreMembership {
  std::unique_ptr<MessagePlane> plane;
  std::string run;  // another one in each run; "local" among threads
  int port = 0;     // that a server listens on; 0 among threads
  // Why a server that has served this run before can't go on: place.journal_failure, or DataLoss if
  // its journal is not here. It listens at its former address, to tell workers.
  absl::Status failure = {};
};

// Returns when the address of every server is known; the plane connects behind the caller's back.
// InvalidArgument for a place that can't be; FailedPrecondition if the members' key files or
// numbers differ; DeadlineExceeded names the member that did not come; Unimplemented without
// libzmq; Unavailable if a server can't listen on its former port; a new server's
// place.journal_failure. Workers get the failure of a server that does not listen.
absl::StatusOr<StoreMembership> JoinStore(const StorePlace& place);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_JOIN_STORE_H_
