// ThreadExecutor: chunks on threads that block in the data plane, one lane each. For planes that
// do not end exchanges by events, such as Gloo's.
#ifndef THINWIRE_SCHEDULE_ENGINE_THREAD_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_THREAD_EXECUTOR_H_

#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/lane.h"
#include "schedule/ring_queue.h"

namespace thinwire {

class ThreadExecutor final : public Executor {
 public:
  // One thread for each announced chunk's lane; up to options.predicted_lanes more when chunks wait
  // and all are busy. References outlive it.
  ThreadExecutor(Lanes& lanes, const Options& options, Records& records, ChunkHost& host)
      : lanes_(lanes), options_(options), records_(records), host_(host) {}
  ~ThreadExecutor() override;

  absl::Status Begin() override;
  void Start(const StartChunk& start) override;
  void Close() override;

 private:
  // A thread and what it is handed.
  struct Worker {
    std::unique_ptr<Lane> lane;
    absl::CondVar handed;
    StartChunk start;
    bool busy = true;  // false while it waits to be handed a chunk
    std::thread thread;
  };

  absl::Status AddWorker(int number);
  void Run(Worker& worker);
  bool Next(Worker& worker);
  void RunChunk(Lane& lane, StartChunk start);

  Lanes& lanes_;
  const Options& options_;
  Records& records_;
  ChunkHost& host_;
  absl::Mutex mu_;
  RingQueue<StartChunk> queue_ ABSL_GUARDED_BY(mu_);  // that found no idle worker
  // The one that has waited longest comes first: a chunk that always went to the same thread would
  // stay on one core, beside the data plane's own thread.
  RingQueue<Worker*> idle_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  int count_ ABSL_GUARDED_BY(mu_) = 0;  // workers, those under construction included
  std::vector<std::unique_ptr<Worker>> workers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_THREAD_EXECUTOR_H_
