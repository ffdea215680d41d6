// DirectPath: small tensors, whose exchange begins at once, outside the order of chunks. A blocking
// call does that on the caller's own thread; others are finished by a thread of this path, and on a
// device they are started by one as well, so that callers never wait for it.
//
// That thread waits for one exchange after another, and for a peer that may be waiting for a tensor
// behind it. So whoever waits for a tensor finishes it: what all ranks have started ends, in
// whatever order they wait.
#ifndef THINWIRE_SCHEDULE_ENGINE_DIRECT_PATH_H_
#define THINWIRE_SCHEDULE_ENGINE_DIRECT_PATH_H_

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/lane.h"
#include "schedule/recycled.h"

namespace thinwire {

// Thread-safe. A tensor is one chunk, and runs as a ChunkTask. Requires a plane that matches by
// tag.
class DirectPath {
 public:
  // References outlive it. In a trace its tensors have rows of their own, from `first_row` on.
  DirectPath(std::unique_ptr<Lane> lane, bool on_device, int first_row, const Options& options,
             Records& records, ChunkListener on_end);
  ~DirectPath();  // after Close; joins its threads

  void Start(const UsePtr& use, bool caller_waits);
  // Finishes the use on the thread of whoever waits for it, unless somebody else does.
  void Help(const UsePtr& use);

  // After a failure, when the plane has been aborted: nothing more begins, and what has begun ends
  // here or on the thread that is at work on it.
  void Close();

 private:
  struct Task {
    int row = 0;
    std::optional<ChunkTask> chunk;
    absl::StatusOr<std::unique_ptr<Exchange>> exchange;
  };
  using TaskPtr = std::unique_ptr<Task>;
  using Queue = RingQueue<UsePtr>;

  void Post(const UsePtr& use);
  void Finish(TaskPtr task);
  TaskPtr NewTask();
  TaskPtr TakePosted(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PushTo(Queue* queue, const UsePtr& use);
  UsePtr PopFrom(Queue* queue);
  void PostLoop();
  void FinishLoop();

  const std::unique_ptr<Lane> lane_;
  const bool on_device_;
  const int first_row_;
  const Options& options_;
  Records& records_;
  const ChunkListener on_end_;
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  // By id, until somebody finishes the tensor; null while it is queued for its exchange to begin.
  RecycledMap<TaskPtr> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<TaskPtr> free_ ABSL_GUARDED_BY(mu_);
  int made_ ABSL_GUARDED_BY(mu_) = 0;
  Queue to_post_ ABSL_GUARDED_BY(mu_);
  Queue to_finish_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_DIRECT_PATH_H_
