// JoinStore: connects a member of a store, given its rank and a rendezvous store. Returns the
// MessagePlane between workers and servers.
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
  int rank = 0;  // first the initial workers, then servers, then workers that come later
  int workers = 1, servers = 1;
  // Set one of the two: a rendezvous store where members find each other, for ZeroMQ over TCP; or
  // the group's name, for members that are threads of this process.
  std::shared_ptr<Store> store;
  std::string local_group;
  std::string group;                       // prefix of keys in `store`; use each prefix once
  std::string key_file;                    // file with the secret; empty: only a token in `store`
  std::string interface, rendezvous_host;  // where a server listens
  std::string zmq_library;
  std::chrono::milliseconds timeout{60000};
  // For servers with a journal: the run in the journal, and the port where its workers call it.
  bool has_journal = false;
  std::string former_run = {};
  int former_port = 0;
  absl::Status journal_failure = {};  // why the journal can't be used

  bool is_server() const { return rank >= workers && rank < workers + servers; }
};

struct StoreMembership {
  std::unique_ptr<MessagePlane> plane;
  std::string run;  // unique per run; "local" among threads
  int port = 0;     // where a server listens; 0 for workers and among threads
  // Why a server that has served this run before can't continue: place.journal_failure, or DataLoss
  // if its journal is not here. It listens at its former address, to report this to workers.
  absl::Status failure = {};
};

// Returns when a server listens, or when a worker knows every server's address; the plane connects
// in the background. InvalidArgument for an invalid place; FailedPrecondition if the members' key
// files or numbers differ; DeadlineExceeded names the member that did not come; Unimplemented
// without libzmq; Unavailable if a server can't listen on its former port; a new server's
// place.journal_failure. Workers get the failure of a server that does not listen.
absl::StatusOr<StoreMembership> JoinStore(const StorePlace& place);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_JOIN_STORE_H_
