// IssuerExecutor: one thread that issues the hops of all chunks, and learns of their ends by
// events. For planes whose exchanges complete behind the host's back.
//
// Where the plane matches exchanges by order, all ranks must issue the same hops in the same order,
// whatever has completed on each. With two hops a chunk, A and G, the order is
// A(c0), A(c1), G(c0), A(c2), G(c1), …: the later hops of a chunk follow the first hop of the next
// one, so that the exchange of one overlaps the reduction of the other. A chunk that is marked to
// drain has all of its hops before the next chunk's; the leader marks those that nothing surely
// follows. Where the plane matches by tag, every hop goes as soon as it can.
#ifndef THINWIRE_SCHEDULE_ENGINE_ISSUER_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_ISSUER_EXECUTOR_H_

#include <deque>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/lane.h"
#include "schedule/ring_queue.h"

namespace thinwire {

class IssuerExecutor final : public Executor {
 public:
  // References outlive it.
  IssuerExecutor(Lanes& lanes, const Options& options, Records& records, ChunkHost& host);
  ~IssuerExecutor() override;

  absl::Status Begin() override;
  void Start(const StartChunk& start) override;
  void Close() override;

 private:
  // A chunk on its way. The issuer's, but for `ended` and `status`, which an event sets.
  struct Task {
    std::unique_ptr<Lane> lane;
    std::unique_ptr<ChunkTask> chunk;
    std::unique_ptr<Exchange> exchange;  // on its way; null: none
    int hops = 0;                        // in all
    int hops_left = 0;                   // to be issued
    bool in_exchange = false;
    bool ended = false;   // the exchange; guarded by mu_
    absl::Status status;  // of the exchange; guarded by mu_
  };
  using Tasks = std::list<Task>;

  void Run();
  bool AwaitEvent() ABSL_LOCKS_EXCLUDED(mu_);
  void Admit(StartChunk start);
  absl::Status AddLane();
  void AddToProgram(Task* task, bool drain);
  void FlushPrevious();
  bool Collect(Task& task);
  bool Step();
  bool IsDue(const Task& task) const;
  void Advance(Task& task);
  void End(Tasks::iterator task, absl::Status status);

  bool HasEvent() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return events_ > 0 || !queue_.empty() || closed_;
  }

  Lanes& lanes_;
  const Matching matching_;
  const Options& options_;
  Records& records_;
  ChunkHost& host_;

  // The issuer thread's own, once it runs.
  std::vector<std::unique_ptr<Lane>> free_;
  int lanes_made_ = 0;
  Tasks tasks_;
  std::deque<Task*> program_;  // whose next hop is issued, in order; Matching::kByOrder
  Task* previous_ = nullptr;   // whose later hops follow the next task's first

  absl::Mutex mu_;
  RingQueue<StartChunk> queue_ ABSL_GUARDED_BY(mu_);
  int events_ ABSL_GUARDED_BY(mu_) = 0;  // exchanges that have ended and were not looked at
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_ISSUER_EXECUTOR_H_
