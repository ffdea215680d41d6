#include "schedule/engine/thread_executor.h"

#include <utility>

namespace thinwire {

ThreadExecutor::ThreadExecutor(std::vector<std::unique_ptr<Lane>> lanes, LaneMaker more, int most,
                               const Options& options, const Instruments& instruments,
                               ChunkHost& host, FailureProtocol& failure)
    : more_(std::move(more)),
      most_(most),
      options_(options),
      instruments_(instruments),
      host_(host),
      failure_(failure) {
  {
    const absl::MutexLock lock(&mu_);
    count_ = static_cast<int>(lanes.size());
  }
  for (std::unique_ptr<Lane>& lane : lanes) AddWorker(std::move(lane));
}

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
    if (count_ < most_ && !closed_) number = count_++;
  }
  if (number >= 0) MakeWorker(number);
}

void ThreadExecutor::MakeWorker(int number) {
  absl::StatusOr<std::unique_ptr<Lane>> lane = more_(number);
  if (!lane.ok()) return failure_.Fail(lane.status(), FailureProtocol::Tell::kEveryone);
  AddWorker(*std::move(lane));
}

void ThreadExecutor::AddWorker(std::unique_ptr<Lane> lane) {
  const absl::MutexLock lock(&mu_);
  if (closed_) return;  // nobody would join the thread
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.lane = std::move(lane);
  worker.thread = std::thread([this, &worker] { Run(worker); });
}

void ThreadExecutor::Run(Worker& worker) {
  while (Next(worker)) RunChunk(*worker.lane, worker.start);
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

void ThreadExecutor::RunChunk(Lane& lane, const StartChunk& start) {
  const WorkPtr work = host_.BeginChunk(start);
  if (work == nullptr) return;
  absl::Status status;
  {
    ChunkTask task(start, work, lane, static_cast<int>(lane.slot()), options_, instruments_);
    for (;;) {
      absl::StatusOr<std::unique_ptr<Exchange>> exchange = task.Advance();
      status = exchange.status();
      if (!status.ok() || *exchange == nullptr) break;
      status = (*exchange)->Wait(task.deadline());
      task.OnHopEnded();
      if (!status.ok()) break;
    }
    status = task.Finish(std::move(status));
  }
  host_.EndChunk(start, work, std::move(status));
}

}  // namespace thinwire
