// Serve: a StoreServer on a MessagePlane.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
#define THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/store/server.h"
#include "schedule/store_host/journal.h"
#include "transport/messages/message_plane.h"

namespace thinwire {

// Ranks in the roster of a store: the workers of the start, the servers, and then workers that come
// later under numbers of their own.
inline int RankOfServer(int workers, int server) { return workers + server; }
inline int RankOfWorker(int workers, int servers, int worker) {
  return worker < workers ? worker : worker + servers;
}
// -1 for a server's.
inline int WorkerOfRank(int workers, int servers, int rank) {
  if (rank < workers) return rank;
  return rank < workers + servers ? -1 : rank - servers;
}

// Serves on the calling thread until every worker has closed its store or was lost, and closes the
// plane. In all modes but sync a lost worker may be started again, so after the last one was lost
// it waits for one. Returns the store's failure, which its workers have been told, or OK.
// DeadlineExceeded after the options' timeout without any worker.
//
// With a journal, which has begun: what it holds is replayed first, every input is appended before
// it is applied, and the file is removed when the last answers are delivered, also of a failed
// store, whose workers have all been told. Workers that do not come back within the timeout are
// lost. DataLoss for a damaged journal, which stays. Why there is no journal, or it can't be
// replayed, is the store's failure: workers that come within the timeout are told.
absl::Status Serve(MessagePlane& plane, StoreServer::Options options,
                   absl::StatusOr<Journal*> journal = nullptr);

// Says that a journal which has not begun needs no server any more: by it all workers have left,
// and it was written within the options' timeout, so it is not an old file that a new run finds.
// The last one may not have heard it, so this counts only where the run's rendezvous store is gone.
// Replays the journal, of which nothing can be read afterwards. False for one of other numbers of
// members, of a failed store, or that can't be read.
bool IsOver(Journal& journal, StoreServer::Options options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
