#include "schedule/engine/executor.h"

#include <utility>

#include "schedule/engine/ending.h"

namespace thinwire {

ChunkTask::ChunkTask(StartChunk start, Lane& lane, int row, const Options& options,
                     Records& records)
    : start_(std::move(start)),
      use_(UseOf(start_)),
      lane_(lane),
      options_(options),
      records_(records),
      clock_(records, use_.label, start_.chunk, row, use_.submitted),
      job_(use_.JobOf(start_.chunk, options)),
      space_(EnterLane()) {
  run_ = job_.chunk->algorithm->Begin(job_, space_->bench(lane_.members()));
  Expect(run_->first());
}

std::unique_ptr<Workspace> ChunkTask::EnterLane() {
  records_.Event(FlightEvent::kStarted, use_.label, start_.chunk, 0, start_.predicted ? 1 : 0);
  clock_.End(Stage::kQueue);
  return lane_.Enter(use_.order, use_.bucket->chunk_memory());
}

void ChunkTask::Expect(const Reception& reception) {
  if (!reception.recv.empty()) {
    expected_ = lane_.plane().Expect(reception.tag, reception.recv);
  }
}

absl::StatusOr<std::unique_ptr<Exchange>> ChunkTask::Advance() {
  if (flushing_) return std::unique_ptr<Exchange>();
  const absl::StatusOr<const Hop*> hop = run_->Advance();
  if (!hop.ok()) return hop.status();
  hop_ = *hop;
  clock_.End(hop_ == nullptr ? Stage::kDecode : hop_->made_in);
  if (hop_ == nullptr) {
    flushing_ = true;
    StreamPlane* const streams = lane_.plane().of_streams();
    return streams == nullptr ? nullptr : streams->Flush();
  }
  records_.Event(FlightEvent::kHopBegun, use_.label, start_.chunk, 0, ++hops_);
  DataPlane& plane = lane_.plane();
  std::unique_ptr<Exchange> exchange = std::move(expected_);
  if (exchange != nullptr) {
    exchange->Send(hop_->send);
  } else {
    exchange = plane.Start(hop_->tag, hop_->send, hop_->recv);
  }
  Expect(hop_->next);
  return exchange;
}

void ChunkTask::OnHopEnded() {
  // The host queues all stages of a lane that flushes, and their time passes in the flush.
  clock_.End(flushing_ ? Stage::kExchange : hop_->stage);
  if (flushing_) return;
  records_.Event(FlightEvent::kHopEnded, use_.label, start_.chunk, 0, hops_);
}

// The engine's watchdog ends an exchange long before the plane's own deadline would.
absl::Status ChunkTask::WaitFrom(absl::StatusOr<std::unique_ptr<Exchange>> exchange) {
  while (exchange.ok() && *exchange != nullptr) {
    absl::Status status = (*exchange)->Wait(use_.deadline + options_.timeout);
    exchange->reset();  // it may hold memory that the next one takes
    OnHopEnded();
    if (!status.ok()) return status;
    exchange = Advance();
  }
  return exchange.status();
}

absl::Status ChunkTask::Finish(absl::Status status) {
  if (expected_ != nullptr) {  // it failed half-way, and the next hop would write into its memory
    lane_.plane().Abort(OfTensor(use_.label, status));
    expected_.reset();
  }
  run_.reset();
  status = lane_.Leave(use_.order, std::move(space_), std::move(status));
  records_.Event(FlightEvent::kChunkDone, use_.label, start_.chunk);
  return status;
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
