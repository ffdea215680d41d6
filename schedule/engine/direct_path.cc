#include "schedule/engine/direct_path.h"

#include <utility>

namespace thinwire {

DirectPath::DirectPath(std::unique_ptr<Lane> lane, bool on_device, int first_row,
                       const Options& options, const Instruments& instruments, ChunkHost& host)
    : lane_(std::move(lane)),
      on_device_(on_device),
      first_row_(first_row),
      options_(options),
      instruments_(instruments),
      host_(host) {
  threads_.emplace_back([this] { FinishLoop(); });
  if (on_device_) threads_.emplace_back([this] { PostLoop(); });
}

DirectPath::~DirectPath() {
  Close();
  for (std::thread& thread : threads_) thread.join();
}

void DirectPath::Start(const WorkPtr& work, bool caller_waits) {
  work->finisher = this;
  {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;
    tasks_.Insert(work->id()).reset();
  }
  if (on_device_) return PushTo(&to_post_, work);
  Post(work);
  if (!caller_waits) PushTo(&to_finish_, work);
}

// Both ends post at once, so that ranks that come in other orders can't block one another.
void DirectPath::Post(const WorkPtr& work) {
  if (host_.BeginChunk({.id = work->id()}) == nullptr) return;  // the group has failed
  TaskPtr task = NewTask();
  task->work = work;
  task->chunk.emplace(StartChunk{.id = work->id()}, work, *lane_, task->row, options_,
                      instruments_);
  task->exchange = task->chunk->Advance();
  {
    const absl::MutexLock lock(&mu_);
    if (!closed_) *tasks_.Find(work->id()) = std::move(task);
  }
  if (task != nullptr) Finish(std::move(task));  // Close could not see it
}

// A tensor is posted soon, since that waits for no peer.
void DirectPath::Help(const WorkPtr& work) {
  const uint64_t id = work->id();
  {
    const auto is_posted = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      const TaskPtr* const task = tasks_.Find(id);
      return closed_ || task == nullptr || *task != nullptr;
    };
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&is_posted));
  }
  if (TaskPtr task = TakePosted(id); task != nullptr) Finish(std::move(task));
}

// The watchdog ends the exchange long before the plane's own deadline would.
void DirectPath::Finish(TaskPtr task) {
  ChunkTask& chunk = *task->chunk;
  absl::Status status;
  for (;;) {
    status = task->exchange.status();
    if (!status.ok() || *task->exchange == nullptr) break;
    status = (*task->exchange)->Wait(chunk.deadline());
    task->exchange->reset();
    chunk.OnHopEnded();
    if (!status.ok()) break;
    task->exchange = chunk.Advance();
  }
  status = chunk.Finish(std::move(status));
  task->chunk.reset();
  const WorkPtr work = std::move(task->work);
  {
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(task));
  }
  host_.EndChunk({.id = work->id()}, work, std::move(status));
}

DirectPath::TaskPtr DirectPath::NewTask() {
  TaskPtr task;
  const absl::MutexLock lock(&mu_);
  if (!free_.empty()) {
    task = std::move(free_.back());
    free_.pop_back();
    return task;
  }
  task = std::make_unique<Task>();
  task->row = first_row_ + made_++;
  return task;
}

// For the one who finishes it; null for all others, and before its exchange has begun.
DirectPath::TaskPtr DirectPath::TakePosted(uint64_t id) {
  const absl::MutexLock lock(&mu_);
  TaskPtr* const found = tasks_.Find(id);
  if (found == nullptr || *found == nullptr) return nullptr;
  TaskPtr task = std::move(*found);
  tasks_.Erase(id);
  return task;
}

void DirectPath::Close() {
  std::vector<TaskPtr> posted;
  {
    const absl::MutexLock lock(&mu_);
    closed_ = true;
    for (auto& [id, task] : tasks_) {
      if (task != nullptr) posted.push_back(std::move(task));
    }
  }
  for (TaskPtr& task : posted) Finish(std::move(task));
}

void DirectPath::PushTo(Queue* queue, const WorkPtr& work) {
  const absl::MutexLock lock(&mu_);
  queue->Push(work);
}

// The queue's next; null once the path is closed.
WorkPtr DirectPath::PopFrom(Queue* queue) {
  const auto may_pop = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !queue->empty(); };
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&may_pop));
  return closed_ ? nullptr : queue->Pop();
}

void DirectPath::PostLoop() {
  while (const WorkPtr work = PopFrom(&to_post_)) {
    Post(work);
    PushTo(&to_finish_, work);
  }
}

void DirectPath::FinishLoop() {
  while (const WorkPtr work = PopFrom(&to_finish_)) {
    if (TaskPtr task = TakePosted(work->id()); task != nullptr) Finish(std::move(task));
  }
}

}  // namespace thinwire
