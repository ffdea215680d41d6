// Serve: a StoreServer on a MessagePlane.
#ifndef THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
#define THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/store/server.h"
#include "schedule/store_host/journal.h"
#include "transport/messages/message_plane.h"

namespace thinwire {

// Ranks in a store's roster: first the initial workers, then the servers, then workers that come
// later, under new numbers.
inline int RankOfServer(int workers, int server) { return workers + server; }
inline int RankOfWorker(int workers, int servers, int worker) {
  return worker < workers ? worker : worker + servers;
}
// -1 for the rank of a server.
inline int WorkerOfRank(int workers, int servers, int rank) {
  if (rank < workers) return rank;
  return rank < workers + servers ? -1 : rank - servers;
}

// Serves on the calling thread until every worker has closed its store or was lost, and closes the
// plane. In all modes but sync a lost worker may be started again, so when the last one is lost the
// server waits for another. Returns the store's failure, which was sent to its workers, or OK.
// DeadlineExceeded after the options' timeout without any worker.
//
// `journal`: null for none, or one after Begin. Its records are replayed first, every input is
// appended before it is applied, and the file is removed after the last answers, also if the store
// failed. Former workers that do not come back within the timeout are lost. If `journal` is an
// error or can't be replayed (DataLoss if damaged), the store fails with that error, which workers
// that come within the timeout receive; the file stays.
absl::Status Serve(MessagePlane& plane, StoreServer::Options options,
                   absl::StatusOr<Journal*> journal = nullptr);

// True if a journal (opened, without Begin) needs no server any more: its records say that all
// workers have left, and it was written within the options' timeout, so it is not an old file that
// a new run finds. Call only if the run's rendezvous store is gone: otherwise the last worker may
// still be waiting for its answer. Replays the journal, from which nothing can be read afterwards.
// False if it can't be read, its numbers of members differ, or its store failed.
bool IsOver(Journal& journal, StoreServer::Options options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_HOST_SERVE_H_
