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
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/stage_clock.h"
#include "schedule/engine/works.h"
#include "schedule/ring_queue.h"

namespace thinwire {

// Where the path's works go when they end.
class DirectHost {
 public:
  virtual ~DirectHost() = default;
  // Called once for every work that was given to Start, or to Abandon before it began.
  virtual void EndDirect(const WorkPtr& work, absl::Status status) = 0;
};

// Thread-safe.
class DirectPath final : private Finisher {
 public:
  // References outlive it.
  DirectPath(std::unique_ptr<Lane> lane, bool on_device, const Options& options,
             StageTotals& totals, DirectHost& host);
  ~DirectPath() override;  // after Close; joins its threads

  void Start(const WorkPtr& work, bool caller_waits);

  // After a failure: nothing more begins.
  void Close();
  // After Close: ends a work that nobody is touching; others end it as they come to it.
  void Abandon(const WorkPtr& work);

 private:
  using Queue = RingQueue<WorkPtr>;

  void Help(const WorkPtr& work) override;
  void Post(const WorkPtr& work);
  void Finish(const WorkPtr& work);
  absl::Status Await(InFlight& work);
  void PushTo(Queue* queue, const WorkPtr& work);
  void PostLoop();
  void FinishLoop();

  bool MayPost() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !to_post_.empty(); }
  bool MayFinish() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !to_finish_.empty(); }

  const std::unique_ptr<Lane> lane_;
  const bool on_device_;
  const Options& options_;
  StageTotals& totals_;
  DirectHost& host_;
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Queue to_post_ ABSL_GUARDED_BY(mu_);
  Queue to_finish_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_DIRECT_PATH_H_
