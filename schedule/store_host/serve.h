// Serve: a StoreServer on a MessagePlane.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
#define THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_

#include "absl/status/status.h"
#include "schedule/store/server.h"
#include "schedule/store_host/journal.h"
#include "transport/messages/message_plane.h"

namespace thinwire {

// The rank of server `server` in the roster of a store with `workers` workers: workers come first.
inline int RankOfServer(int workers, int server) { return workers + server; }

// Serves on the calling thread until every worker has closed its store or was lost, and closes the
// plane. Returns the store's failure, which its workers have been told, or OK. DeadlineExceeded
// after the options' timeout without any worker.
//
// With a journal, which has begun: what it holds is replayed first, every input is appended before
// it is applied, and the file is removed at the end, also of a failed store, whose workers have all
// been told. Workers that do not come back within the timeout are lost. DataLoss for a damaged
// journal.
absl::Status Serve(MessagePlane& plane, StoreServer::Options options, Journal* journal = nullptr);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
