#include "schedule/engine/executor.h"

#include <utility>

#include "schedule/engine/ending.h"

namespace thinwire {

bool ChunkTask::Begin() {
  Use& use = UseOf(start);
  if (!use.BeginChunk()) return false;
  hop_ = nullptr;
  hops_ = 0;
  flushing_ = false;
  last_ = use.submitted;
  records_.Event(FlightEvent::kStarted, use.label, start.chunk, 0, start.predicted ? 1 : 0);
  EndStage(Stage::kQueue);
  space_ = lane_.Enter(use.ready, use.fence.get(), use.bucket->chunk_memory());
  const ChunkJob job = use.JobOf(start.chunk, options_);
  run_ = job.chunk->algorithm->begin(job, space_->bench(lane_.members()));
  Expect(run_->first());
  return true;
}

void ChunkTask::EndStage(Stage stage) {
  const Clock::time_point now = Clock::now();
  records_.AddStage(stage, use().label, start.chunk, row_, last_, now);
  last_ = now;
}

void ChunkTask::Expect(const Reception& reception) {
  if (!reception.recv.empty()) {
    expected_ = lane_.plane().Expect(reception.tag, reception.recv);
  }
}

bool ChunkTask::Advance() {
  if (flushing_) return false;
  const absl::StatusOr<const Hop*> hop = run_->Advance();
  status = hop.status();
  if (!hop.ok()) return false;
  hop_ = *hop;
  EndStage(hop_ == nullptr ? Stage::kDecode : hop_->made_in);
  if (hop_ == nullptr) {
    flushing_ = true;
    StreamPlane* const streams = lane_.plane().of_streams();
    if (streams != nullptr) exchange = streams->Flush();
    return exchange != nullptr;
  }
  records_.Event(FlightEvent::kHopBegun, use().label, start.chunk, 0, ++hops_);
  exchange = std::move(expected_);
  if (exchange != nullptr) {
    exchange->Send(hop_->send);
  } else {
    exchange = lane_.plane().Start(hop_->tag, hop_->send, hop_->recv);
  }
  Expect(hop_->next);
  return true;
}

void ChunkTask::OnHopEnded() {
  exchange.reset();  // it may hold memory that the next one takes
  // The host queues all stages of a lane that flushes, and their time passes in the flush.
  EndStage(flushing_ ? Stage::kExchange : hop_->stage);
  if (flushing_) return;
  records_.Event(FlightEvent::kHopEnded, use().label, start.chunk, 0, hops_);
  if (status.ok() && ordered() && start.position != 0) (*on_hop_)(start);
}

// The engine's watchdog ends an exchange long before the plane's own deadline would.
void ChunkTask::WaitForAll() {
  while (exchange != nullptr) {
    status = exchange->Wait(use().deadline + options_.timeout);
    OnHopEnded();
    if (status.ok()) Advance();
  }
}

absl::Status ChunkTask::Finish() {
  if (expected_ != nullptr) {  // it failed half-way, and the next hop would write into its memory
    lane_.plane().Abort(OfTensor(use().label, status));
    expected_.reset();
  }
  run_.reset();
  absl::Status ended = lane_.Leave(use().fence.get(), std::move(space_), std::move(status));
  records_.Event(FlightEvent::kChunkDone, use().label, start.chunk);
  return ended;
}

void IssueOrder::Add(const void* chunk, int hops, bool drain) {
  hops_.push_back(chunk);
  FlushPrevious();
  previous_ = chunk;
  later_hops_ = hops - 1;
  if (drain) FlushPrevious();
}

// They are next, whether the first one has been issued by now or not.
void IssueOrder::FlushPrevious() {
  if (previous_ != nullptr) hops_.insert(hops_.end(), later_hops_, previous_);
  previous_ = nullptr;
}

void IssueOrder::Remove(const void* chunk) {
  if (previous_ == chunk) previous_ = nullptr;
  std::erase(hops_, chunk);
}

Executor::Executor(Lanes& lanes, Lanes& direct_lanes, const Options& options, Records& records,
                   HopListener on_hop, ChunkListener on_end)
    : lanes_(lanes),
      direct_lanes_(direct_lanes),
      traits_(lanes.traits()),
      options_(options),
      records_(records),
      on_hop_(std::move(on_hop)),
      on_end_(std::move(on_end)) {}

Executor::~Executor() {
  Close();
  std::vector<std::thread> threads;
  {
    const absl::MutexLock lock(&mu_);
    for (const auto& worker : workers_) threads.push_back(std::move(worker->thread));
    for (DirectQueue* queue : {&to_post_, &to_finish_}) {
      if (queue->thread.joinable()) threads.push_back(std::move(queue->thread));
    }
  }
  for (std::thread& thread : threads) thread.join();
}

absl::Status Executor::Begin() {
  for (int lane = 0; lane < options_.lanes; ++lane) {
    if (absl::Status status = AddLane(); !status.ok()) return status;
  }
  if (traits_.matching == Matching::kByTag) {  // else small tensors go in order as well
    absl::StatusOr<std::unique_ptr<Lane>> lane = direct_lanes_.Make(options_.lanes);
    if (!lane.ok()) return lane.status();
    direct_lane_ = *std::move(lane);
  }
  const absl::MutexLock lock(&mu_);
  const int workers = traits_.completion == Completion::kEvents ? 1 : options_.lanes;
  while (static_cast<int>(workers_.size()) < workers) AddWorker();
  return absl::OkStatus();
}

// Slots in fences: those of announced chunks come first, then that of small tensors, then those of
// predicted chunks.
absl::Status Executor::AddLane() {
  int number;
  {
    const absl::MutexLock lock(&mu_);
    number = static_cast<int>(tasks_.size());
  }
  const int slot = number < options_.lanes ? number : number + 1;
  absl::StatusOr<std::unique_ptr<Lane>> lane = lanes_.Make(slot);
  if (!lane.ok()) return lane.status();
  const absl::MutexLock lock(&mu_);
  made_lanes_.push_back(*std::move(lane));
  tasks_.push_back(
      std::make_unique<ChunkTask>(*made_lanes_.back(), slot, options_, records_, &on_hop_));
  free_.push_back(tasks_.back().get());
  return absl::OkStatus();
}

void Executor::AddWorker() {
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.thread = std::thread([this, &worker] { Run(worker); });
}

void Executor::Start(const StartChunk& start) {
  while (!Admit(start)) {
    if (absl::Status status = AddLane(); !status.ok()) {
      if (UseOf(start).BeginChunk()) on_end_(start, std::move(status));
      return;
    }
  }
}

// False if there is no free lane.
bool Executor::Admit(const StartChunk& start) {
  const absl::MutexLock lock(&mu_);
  if (closed_) return true;
  if (free_.empty()) return false;
  ChunkTask* const task = free_.back();
  free_.pop_back();
  task->start = start;
  task->status = absl::OkStatus();
  if (traits_.matching == Matching::kByOrder) {
    const Chunk& chunk = UseOf(start).bucket->partition().chunks[start.chunk];
    task->hops_left = chunk.algorithm->hops;
    order_.Add(task, task->hops_left, start.drain);
  }
  const bool all_busy = idle_.empty();
  MakeReady(task);
  const bool more = static_cast<int>(workers_.size()) < options_.lanes + options_.predicted_lanes;
  if (all_busy && more && traits_.completion == Completion::kBlocking) AddWorker();
  return true;
}

// True if the task may go on, as far as the order of hops is concerned; with none left it has only
// to be finished.
bool Executor::IsDue(const ChunkTask& task) const {
  if (traits_.matching == Matching::kByTag || closed_) return true;
  return task.hops_left == 0 || order_.IsNext(&task);
}

// Null if no task that is ready is due.
ChunkTask* Executor::TakeDue() {
  for (auto at = ready_.begin(); at != ready_.end(); ++at) {
    ChunkTask* const task = *at;
    if (!IsDue(*task)) continue;
    ready_.erase(at);
    if (closed_) task->status.Update(absl::CancelledError("the group has failed"));
    return task;
  }
  return nullptr;
}

void Executor::MakeReady(ChunkTask* task) {
  ready_.push_back(task);
  HandOut();
}

void Executor::HandOut() {
  while (!idle_.empty()) {
    ChunkTask* const task = TakeDue();
    if (task == nullptr) return;
    Worker& worker = *idle_.Pop();
    worker.task = task;
    worker.handed.Signal();
  }
}

void Executor::LetGoIfOver() {
  while (over() && !idle_.empty()) idle_.Pop()->handed.Signal();
}

void Executor::Close() {
  std::vector<ChunkTask*> posted;
  {
    const absl::MutexLock lock(&mu_);
    closed_ = true;
    HandOut();
    LetGoIfOver();
    direct_.ForEach([&](uint64_t, ChunkTask*& task) {
      if (task != nullptr) posted.push_back(std::exchange(task, nullptr));
    });
    posted_.SignalAll();
    to_post_.pushed.SignalAll();
    to_finish_.pushed.SignalAll();
  }
  for (ChunkTask* const task : posted) FinishPosted(*task);
}

void Executor::Run(Worker& worker) {
  while (ChunkTask* const task = Next(worker)) GoOn(*task);
}

// Null once the executor is closed and nothing is on its way.
ChunkTask* Executor::Next(Worker& worker) {
  const absl::MutexLock lock(&mu_);
  if (ChunkTask* const task = TakeDue(); task != nullptr || over()) return task;
  idle_.Push(&worker);
  while (worker.task == nullptr && !over()) worker.handed.Wait(&mu_);
  return std::exchange(worker.task, nullptr);
}

// Works on the chunk until it ends, or an event is to bring it back.
void Executor::GoOn(ChunkTask& task) {
  if (task.begun()) {
    task.OnHopEnded();
  } else if (!task.status.ok() || !task.Begin()) {
    return Release(task);  // the group has failed
  }
  if (traits_.completion == Completion::kBlocking) {
    if (task.Advance()) task.WaitForAll();
  } else if (task.status.ok() && Issue(task)) {
    return;
  }
  Finish(task);
}

void Executor::Finish(ChunkTask& task) {
  absl::Status status = task.Finish();
  const StartChunk start = std::move(task.start);
  Release(task);  // the chunk that follows this one may need its lane
  on_end_(start, std::move(status));
}

// Starts the task's next exchange; false if there is none.
bool Executor::Issue(ChunkTask& task) {
  if (!task.Advance()) return false;
  if (task.hops_left > 0) {  // else it is the flush, which no order concerns
    --task.hops_left;
    const absl::MutexLock lock(&mu_);
    if (!closed_) order_.Pop();
  }
  task.exchange->OnDone([this, &task](absl::Status status) {
    const absl::MutexLock lock(&mu_);
    task.status = std::move(status);
    MakeReady(&task);
  });
  return true;
}

void Executor::Release(ChunkTask& task) {
  task.start.host.reset();
  const absl::MutexLock lock(&mu_);
  if (!task.ordered()) return free_direct_.push_back(&task);
  if (task.hops_left > 0) order_.Remove(&task);  // it failed
  free_.push_back(&task);
  LetGoIfOver();
}

void Executor::StartDirect(const UsePtr& use, bool caller_waits) {
  use->helper = this;
  if (!direct_lanes_.on_device()) {
    Post(use);
    if (caller_waits) return;
  }
  const absl::MutexLock lock(&mu_);
  if (closed_) return;
  if (direct_lanes_.on_device()) {
    direct_.Insert(use->id()) = nullptr;
    Push(to_post_, use);
  } else {
    Push(to_finish_, use);
  }
}

void Executor::Post(const UsePtr& use) {
  ChunkTask& task = NewDirectTask();
  task.start = {.id = use->id(), .host = use};
  if (!task.Begin()) return Release(task);  // the group has failed
  task.Advance();
  {
    const absl::MutexLock lock(&mu_);
    if (!closed_) {
      direct_.Insert(use->id()) = &task;
      return posted_.SignalAll();
    }
  }
  FinishPosted(task);  // Close could not see it
}

// A tensor is posted soon, since that waits for no peer.
void Executor::Help(const UsePtr& use) {
  const uint64_t id = use->id();
  ChunkTask* task = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    for (;;) {
      ChunkTask* const* const found = direct_.Find(id);
      if (closed_ || found == nullptr || *found != nullptr) break;
      posted_.Wait(&mu_);
    }
    task = TakePosted(id);
  }
  if (task != nullptr) FinishPosted(*task);
}

void Executor::FinishPosted(ChunkTask& task) {
  task.WaitForAll();
  Finish(task);
}

ChunkTask& Executor::NewDirectTask() {
  const absl::MutexLock lock(&mu_);
  if (free_direct_.empty()) {
    // Their rows are behind those of all lanes.
    const size_t row = options_.lanes + options_.predicted_lanes + direct_tasks_.size() + 1;
    return *direct_tasks_.emplace_back(std::make_unique<ChunkTask>(
        *direct_lane_, static_cast<int>(row), options_, records_, nullptr));
  }
  ChunkTask& task = *free_direct_.back();
  free_direct_.pop_back();
  return task;
}

// For the thread that finishes it; null for all others, and before its exchange has begun.
ChunkTask* Executor::TakePosted(uint64_t id) {
  ChunkTask** const found = direct_.Find(id);
  if (found == nullptr || *found == nullptr) return nullptr;
  ChunkTask* const task = *found;
  direct_.Erase(id);
  return task;
}

void Executor::PostQueued(const UsePtr& use) {
  Post(use);
  const absl::MutexLock lock(&mu_);
  Push(to_finish_, use);
}

void Executor::FinishQueued(const UsePtr& use) {
  ChunkTask* task = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    task = TakePosted(use->id());
  }
  if (task != nullptr) FinishPosted(*task);
}

void Executor::Push(DirectQueue& queue, const UsePtr& use) {
  if (closed_) return;
  queue.uses.Push(use);
  queue.pushed.Signal();
  if (queue.thread.joinable()) return;
  queue.thread = std::thread([this, &queue] {
    while (const UsePtr next = PopFrom(queue)) (this->*queue.work)(next);
  });
}

// Null once the executor is closed.
UsePtr Executor::PopFrom(DirectQueue& queue) {
  const absl::MutexLock lock(&mu_);
  while (!closed_ && queue.uses.empty()) queue.pushed.Wait(&mu_);
  return closed_ ? nullptr : queue.uses.Pop();
}

}  // namespace thinwire
