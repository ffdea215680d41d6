// Executor: runs chunks in the order in which the sequencer starts them, and small tensors at once.
// Windows, priorities and errors depend on a chunk's completion, which is reported to a
// ChunkListener, not on the return of Start.
#ifndef THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "schedule/containers.h"
#include "schedule/engine/records.h"
#include "schedule/engine/tensors.h"
#include "schedule/engine/workspaces.h"
#include "schedule/order/frames.h"
#include "transport/planes.h"

namespace thinwire {

// The chunk is done or has failed. Called once per chunk that began, on the thread that ran it.
using ChunkListener = std::function<void(const StartChunk& start, absl::Status status)>;

// A hop of a predicted chunk has ended, and has not failed. Called on the thread that runs the
// chunk, before the chunk's ChunkListener.
using HopListener = std::function<void(const StartChunk& start)>;

// Lane: carries one chunk at a time from its start to its end, over a data plane, and on a device
// on a stream; records its times and events. Used by one thread at a time.
class Lane {
 public:
  // References must outlive the lane. `slot`: its own index in every fence. `on_hop`: null for
  // small tensors, which are outside the order. Fails if the device does.
  static absl::StatusOr<std::unique_ptr<Lane>> Make(Workspaces& spaces, int slot,
                                                    const Options& options, Records& records,
                                                    const HopListener* on_hop);
  // A lane with the slot of `beside`, and on a device with its stream, on which their chunks run
  // one after another. `row`: its own row of the trace; a lane that Make returns uses its slot.
  Lane(const Lane& beside, int row);

  // For the executor.
  StartChunk start;                    // the chunk that it carries
  int hops_left = 0;                   // not issued yet
  std::unique_ptr<Exchange> exchange;  // under way
  absl::Status status;                 // an error if the chunk must end

  bool ordered() const { return on_hop_ != nullptr; }
  bool begun() const { return run_ != nullptr; }

  // Begins the chunk; false if the group has failed.
  bool Begin();
  // Works up to the next exchange, and starts it; false: the chunk is done or has failed. If the
  // plane flushes streams, the flush is the last exchange.
  bool Advance();
  // The exchange has ended, with `status`.
  void OnHopEnded();
  // Ends the exchange, and all that follow it, on this thread.
  void WaitForAll();
  // Ends the chunk on this rank, and returns its status. After an error nothing touches the tensor
  // any more. Otherwise, on a device, the work may go on: it is in the tensor's fence.
  absl::Status Finish();

 private:
  Lane(Workspaces& spaces, int slot, const Options& options, Records& records,
       const HopListener* on_hop)
      : spaces_(spaces),
        slot_(slot),
        row_(slot),
        options_(options),
        records_(records),
        on_hop_(on_hop) {}

  void EndStage(Stage stage);
  void Expect(const Reception& reception);
  absl::Status AwaitStream(const std::shared_ptr<DeviceEvent>& end);
  DataPlane& plane() { return of_stream_ ? *of_stream_ : spaces_.plane(); }
  const Use& use() const { return UseOf(start); }

  Workspaces& spaces_;
  const int slot_, row_;
  const Options& options_;
  Records& records_;
  const HopListener* const on_hop_;
  std::shared_ptr<DeviceStream> stream_;  // null: the host
  std::shared_ptr<DataPlane> of_stream_;  // null: the host
  Clock::time_point last_;                // end of the last stage, where the next one begins
  std::unique_ptr<Workspace> space_;
  std::unique_ptr<ChunkRun> run_;
  const Hop* hop_ = nullptr;  // under way
  // The exchange of the next hop, already receiving, if the plane can do that.
  std::unique_ptr<Exchange> expected_;
  uint64_t hops_ = 0;
  bool flushing_ = false;
};

// The order in which hops are issued to a plane that matches by order: all ranks must issue the
// same hops in the same order, whatever has completed on each rank. With two hops a chunk, A and G,
// it is A(c0), A(c1), G(c0), A(c2), G(c1), …: the later hops of a chunk follow the first hop of the
// next one, so that the exchange of one overlaps the reduction of the other. A chunk marked to
// drain has all of its hops before the next chunk's; the leader marks chunks that may be the last
// for a while. A pointer identifies a chunk. Not thread-safe.
class IssueOrder {
 public:
  void Add(const void* chunk, int hops, bool drain);
  void Remove(const void* chunk);  // the chunk ended early
  bool IsNext(const void* chunk) const { return !hops_.empty() && hops_.front() == chunk; }
  void Pop() { hops_.pop_front(); }

 private:
  void FlushPrevious();

  std::deque<const void*> hops_;    // the chunk of each
  const void* previous_ = nullptr;  // its later hops follow the next chunk's first hop
  int later_hops_ = 0;              // of the previous chunk
};

// Each chunk has a lane from its start to its end. If the data plane reports the end of exchanges
// by events, one worker issues the hops of all chunks, and an event returns a chunk to it. If it
// does not (Gloo), each chunk has a worker, which blocks in its exchanges.
//
// A small tensor is one chunk, and its exchange begins at once, outside the order of chunks, so
// that ranks that submit in different orders can't block one another. A blocking call does that on
// the caller's thread. Other calls are finished by a thread, and on a device started by another
// one, so that callers never wait for the device. The finishing thread takes one exchange after
// another, so it may wait for a peer that waits for a tensor further back in this rank's queue.
// Therefore a caller that waits for a tensor finishes it itself: every tensor that all ranks have
// started ends, in whatever order they wait. Thread-safe.
class Executor {
 public:
  // References must outlive this object. `direct_spaces`: for small tensors.
  Executor(Workspaces& spaces, Workspaces& direct_spaces, const Options& options, Records& records,
           HopListener on_hop, ChunkListener on_end);
  ~Executor();  // joins its threads

  // Makes the lanes of announced chunks, and the workers. Call once, before Start. Fails if the
  // device does, or if no more threads can be started.
  absl::Status Begin();

  // Queues the chunk and returns. start.host must be the chunk's Use.
  void Start(const StartChunk& start);

  // Starts a small tensor, over a plane that matches by tag.
  void StartDirect(const UsePtr& use, bool caller_waits);
  // Finishes a small tensor on the calling thread, unless another thread does.
  void Help(const UsePtr& use);

  // Starts nothing more. Call after the data plane was aborted, which ends the chunks under way;
  // small tensors end in this call, or on the thread that is working on them.
  void Close();

 private:
  struct Worker {
    absl::CondVar handed;
    Lane* lane = nullptr;  // handed to this worker
    std::thread thread;
  };

  absl::Status AddLane();
  absl::Status AddWorker() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Admit(const StartChunk& start);
  bool IsDue(const Lane& lane) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  Lane* TakeDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MakeReady(Lane* lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void HandOut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LetGoIfOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool over() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return closed_ && free_.size() == lanes_.size();
  }

  void Run(Worker& worker);
  Lane* Next(Worker& worker);
  void GoOn(Lane& lane);
  bool Issue(Lane& lane);
  void Finish(Lane& lane);
  void Release(Lane& lane);

  // Small tensors that wait for the queue's thread; the first one starts the thread.
  struct DirectQueue {
    void (Executor::*const work)(const UsePtr& use);
    RingQueue<UsePtr> uses = {};
    absl::CondVar pushed = {};
    std::thread thread = {};
  };
  absl::Status Push(DirectQueue& queue, const UsePtr& use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  UsePtr PopFrom(DirectQueue& queue);
  void Post(const UsePtr& use);
  void PostQueued(const UsePtr& use);
  void FinishQueued(const UsePtr& use);
  Lane& FreeDirectLane();
  Lane* TakePosted(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishPosted(Lane& lane);

  Workspaces &spaces_, &direct_spaces_;
  const DataTraits traits_;
  const Options& options_;
  Records& records_;
  const HopListener on_hop_;
  const ChunkListener on_end_;
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mu_);
  std::vector<Lane*> free_ ABSL_GUARDED_BY(mu_);
  std::vector<Lane*> ready_ ABSL_GUARDED_BY(mu_);  // not due yet, or no worker was idle
  IssueOrder order_ ABSL_GUARDED_BY(mu_);          // Matching::kByOrder only
  std::vector<std::unique_ptr<Worker>> workers_ ABSL_GUARDED_BY(mu_);
  // Longest idle first: if chunks always went to the same thread, they would stay on one core,
  // together with the data plane's own thread.
  RingQueue<Worker*> idle_ ABSL_GUARDED_BY(mu_);

  // By tensor id, until a thread finishes the tensor; null while it is queued in to_post_.
  RecycledMap<Lane*> direct_ ABSL_GUARDED_BY(mu_);
  absl::CondVar posted_;
  // One for each small tensor under way, all on the stream of the first. Empty if no small tensor
  // goes at once.
  std::vector<std::unique_ptr<Lane>> direct_lanes_ ABSL_GUARDED_BY(mu_);
  std::vector<Lane*> free_direct_ ABSL_GUARDED_BY(mu_);
  DirectQueue to_post_ ABSL_GUARDED_BY(mu_) = {&Executor::PostQueued};
  DirectQueue to_finish_ ABSL_GUARDED_BY(mu_) = {&Executor::FinishQueued};
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
