// Executors run chunks in the order in which the sequencer starts them. Everything that follows a
// chunk (windows, priorities, errors) goes by its completion, which comes to the ChunkHost, not by
// the return of Start.
#ifndef THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_

#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/bucket.h"
#include "schedule/engine/lane.h"
#include "schedule/engine/records.h"
#include "schedule/order/outbox.h"
#include "schedule/ring_queue.h"
#include "transport/planes.h"

namespace thinwire {

// Hears of chunks. Called from the threads that run them.
class ChunkHost {
 public:
  virtual ~ChunkHost() = default;
  // The chunk is done, or has failed. Called once for every chunk that its use let begin.
  virtual void EndChunk(const StartChunk& start, absl::Status status) = 0;
  // No more chunks can be run.
  virtual void FailGroup(absl::Status reason) = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;  // after Close; joins its threads

  // Makes the lanes of announced chunks. Once, and before Start. Fails with the device.
  virtual absl::Status Begin() = 0;

  // Queues the chunk and returns. Its host is its Use. Thread-safe.
  virtual void Start(const StartChunk& start) = 0;

  // Starts nothing more. Chunks on their way end when the data plane is aborted.
  virtual void Close() = 0;
};

// A lane's slot in fences: those of announced chunks come first, then the direct path's, then those
// of predicted chunks.
inline int SlotOfLane(int number, int announced) {
  return number < announced ? number : number + 1;
}

// A chunk on a lane, from its start to its end, with the clock and the recorder running. Not
// thread-safe.
class ChunkTask {
 public:
  // References outlive it. `row`: of a trace, where no other chunk is meanwhile.
  ChunkTask(StartChunk start, Lane& lane, int row, const Options& options, Records& records);

  // Works up to the next exchange, and starts it; null: the chunk is done. The last one is the
  // flush of the lane's stream, where the plane has such.
  absl::StatusOr<std::unique_ptr<Exchange>> Advance();
  // The exchange that Advance started has ended.
  void OnHopEnded();
  // Ends an exchange, and all that follow it, on this thread. Returns the chunk's status.
  absl::Status WaitFrom(absl::StatusOr<std::unique_ptr<Exchange>> exchange);

  // Ends the lane's part; with a bad status the lane no longer touches the tensor afterwards.
  absl::Status Finish(absl::Status status);

  const StartChunk& start() const { return start_; }

 private:
  std::unique_ptr<Workspace> EnterLane();
  void Expect(const Reception& reception);

  const StartChunk start_;
  const Use& use_;  // of the start, which keeps it alive
  Lane& lane_;
  const Options& options_;
  Records& records_;
  StageClock clock_;
  const ChunkJob job_;
  std::unique_ptr<Workspace> space_;
  std::unique_ptr<ChunkRun> run_;
  const Hop* hop_ = nullptr;  // under way
  // The exchange of the coming hop, be it the first or a later one, if the plane receives ahead.
  std::unique_ptr<Exchange> expected_;
  uint64_t hops_ = 0;
  bool flushing_ = false;
};

// Runs chunks on threads that block in the data plane, one lane each. For planes that do not end
// exchanges by events, such as Gloo's.
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

#endif  // THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
