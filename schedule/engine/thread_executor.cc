#include "schedule/engine/thread_executor.h"

#include <utility>

namespace thinwire {

ThreadExecutor::~ThreadExecutor() {
  Close();
  std::vector<std::unique_ptr<Worker>> workers;
  {
    const absl::MutexLock lock(&mu_);
    workers = std::move(workers_);
  }
  for (const std::unique_ptr<Worker>& worker : workers) worker->thread.join();
}

void ThreadExecutor::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
  for (const std::unique_ptr<Worker>& worker : workers_) worker->handed.Signal();
}

absl::Status ThreadExecutor::Begin() {
  {
    const absl::MutexLock lock(&mu_);
    count_ = options_.lanes;
  }
  for (int number = 0; number < options_.lanes; ++number) {
    if (absl::Status status = AddWorker(number); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void ThreadExecutor::Start(const StartChunk& start) {
  int number = -1;
  {
    const absl::MutexLock lock(&mu_);
    if (!idle_.empty()) {
      Worker& worker = *idle_.Pop();
      worker.start = start;
      worker.busy = true;
      worker.handed.Signal();
      return;
    }
    queue_.Push(start);
    if (count_ < options_.lanes + options_.predicted_lanes && !closed_) number = count_++;
  }
  if (number < 0) return;
  if (absl::Status status = AddWorker(number); !status.ok()) host_.FailGroup(std::move(status));
}

absl::Status ThreadExecutor::AddWorker(int number) {
  absl::StatusOr<std::unique_ptr<Lane>> lane = lanes_.Make(SlotOfLane(number, options_.lanes));
  if (!lane.ok()) return lane.status();
  const absl::MutexLock lock(&mu_);
  if (closed_) return absl::OkStatus();  // nobody would join the thread
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.lane = *std::move(lane);
  worker.thread = std::thread([this, &worker] { Run(worker); });
  return absl::OkStatus();
}

void ThreadExecutor::Run(Worker& worker) {
  while (Next(worker)) RunChunk(*worker.lane, std::move(worker.start));
}

// The worker's next chunk, in worker.start; false once the executor is closed.
bool ThreadExecutor::Next(Worker& worker) {
  const absl::MutexLock lock(&mu_);
  if (closed_) return false;
  if (!queue_.empty()) {
    worker.start = queue_.Pop();
    return true;
  }
  worker.busy = false;
  idle_.Push(&worker);
  while (!worker.busy && !closed_) worker.handed.Wait(&mu_);
  return !closed_;
}

void ThreadExecutor::RunChunk(Lane& lane, StartChunk start) {
  if (!UseOf(start).BeginChunk()) return;  // the group has failed
  absl::Status status;
  {
    ChunkTask task(start, lane, lane.slot(), options_, records_);
    status = task.Finish(task.WaitFrom(task.Advance()));
  }
  host_.EndChunk(start, std::move(status));
}

}  // namespace thinwire
