#include "schedule/engine/direct_path.h"

#include <utility>

namespace thinwire {

DirectPath::DirectPath(std::unique_ptr<Lane> lane, bool on_device, int first_row,
                       const Options& options, Records& records, ChunkListener on_end)
    : lane_(std::move(lane)),
      on_device_(on_device),
      first_row_(first_row),
      options_(options),
      records_(records),
      on_end_(std::move(on_end)) {
  threads_.emplace_back([this] { FinishLoop(); });
  if (on_device_) threads_.emplace_back([this] { PostLoop(); });
}

DirectPath::~DirectPath() {
  Close();
  for (std::thread& thread : threads_) thread.join();
}

void DirectPath::Start(const UsePtr& use, bool caller_waits) {
  use->direct_path = this;
  if (on_device_) {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;
    tasks_.Insert(use->id()).reset();
    to_post_.Push(use);
    return;
  }
  Post(use);
  if (!caller_waits) PushTo(&to_finish_, use);
}

// Both ends post at once, so that ranks that come in other orders can't block one another.
void DirectPath::Post(const UsePtr& use) {
  if (!use->BeginChunk()) return;  // the group has failed
  TaskPtr task = NewTask();
  task->chunk.emplace(StartChunk{.id = use->id(), .host = use}, *lane_, task->row, options_,
                      records_, nullptr);
  task->exchange = task->chunk->Advance();
  {
    const absl::MutexLock lock(&mu_);
    if (!closed_) {
      TaskPtr* const queued = tasks_.Find(use->id());  // on a device
      (queued != nullptr ? *queued : tasks_.Insert(use->id())) = std::move(task);
    }
  }
  if (task != nullptr) Finish(std::move(task));  // Close could not see it
}

// A tensor is posted soon, since that waits for no peer.
void DirectPath::Help(const UsePtr& use) {
  const uint64_t id = use->id();
  TaskPtr task;
  {
    const auto is_posted = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      const TaskPtr* const posted = tasks_.Find(id);
      return closed_ || posted == nullptr || *posted != nullptr;
    };
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&is_posted));
    task = TakePosted(id);
  }
  if (task != nullptr) Finish(std::move(task));
}

void DirectPath::Finish(TaskPtr task) {
  ChunkTask& chunk = *task->chunk;
  absl::Status status = chunk.Finish(chunk.WaitFrom(std::move(task->exchange)));
  const StartChunk start = chunk.start();
  task->chunk.reset();
  {
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(task));
  }
  on_end_(start, std::move(status));
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

void DirectPath::PushTo(Queue* queue, const UsePtr& use) {
  const absl::MutexLock lock(&mu_);
  queue->Push(use);
}

// The queue's next; null once the path is closed.
UsePtr DirectPath::PopFrom(Queue* queue) {
  const auto may_pop = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !queue->empty(); };
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&may_pop));
  return closed_ ? nullptr : queue->Pop();
}

void DirectPath::PostLoop() {
  while (const UsePtr use = PopFrom(&to_post_)) {
    Post(use);
    PushTo(&to_finish_, use);
  }
}

void DirectPath::FinishLoop() {
  while (const UsePtr use = PopFrom(&to_finish_)) {
    TaskPtr task;
    {
      const absl::MutexLock lock(&mu_);
      task = TakePosted(use->id());
    }
    if (task != nullptr) Finish(std::move(task));
  }
}

}  // namespace thinwire
