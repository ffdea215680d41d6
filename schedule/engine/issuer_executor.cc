#include "schedule/engine/issuer_executor.h"

#include <algorithm>
#include <utility>

namespace thinwire {

IssuerExecutor::IssuerExecutor(std::vector<std::unique_ptr<Lane>> lanes, LaneMaker more,
                               Matching matching, const Options& options,
                               const Instruments& instruments, ChunkHost& host,
                               FailureProtocol& failure)
    : more_(std::move(more)),
      matching_(matching),
      options_(options),
      instruments_(instruments),
      host_(host),
      failure_(failure),
      lanes_(std::move(lanes)),
      lanes_made_(static_cast<int>(lanes_.size())),
      thread_([this] { Run(); }) {}

IssuerExecutor::~IssuerExecutor() {
  Close();
  thread_.join();
}

void IssuerExecutor::Start(const StartChunk& start) {
  const absl::MutexLock lock(&mu_);
  queue_.Push(start);
}

void IssuerExecutor::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
}

void IssuerExecutor::Run() {
  while (AwaitEvent()) {
    while (Step()) {
    }
  }
}

// Takes in what has come. False once nothing is on its way and nothing more will be started.
bool IssuerExecutor::AwaitEvent() {
  std::vector<StartChunk> started;
  bool closed;
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &IssuerExecutor::HasEvent));
    events_ = 0;
    closed = closed_;
    while (!queue_.empty()) started.push_back(queue_.Pop());
  }
  if (!closed) {
    for (const StartChunk& start : started) Admit(start);
    return true;
  }
  // A task without an exchange on its way ends here; the others end with their exchanges.
  program_.clear();
  for (auto task = tasks_.begin(); task != tasks_.end();) {
    const auto here = task++;
    if (Collect(*here)) End(here, absl::CancelledError("the group has failed"));
  }
  if (tasks_.empty()) return false;
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](int* events) { return *events > 0; }, &events_));
  return true;
}

void IssuerExecutor::Admit(const StartChunk& start) {
  WorkPtr work = host_.BeginChunk(start);
  if (work == nullptr) return;
  if (lanes_.empty()) {
    absl::StatusOr<std::unique_ptr<Lane>> lane = more_(lanes_made_);
    if (!lane.ok()) {
      failure_.Fail(lane.status(), FailureProtocol::Tell::kEveryone);
      return host_.EndChunk(start, work, lane.status());
    }
    ++lanes_made_;
    lanes_.push_back(*std::move(lane));
  }
  Task& task = tasks_.emplace_back();
  task.lane = std::move(lanes_.back());
  lanes_.pop_back();
  task.hops = task.hops_left = work->bucket->partition().chunks[start.chunk].algorithm->hops();
  task.chunk =
      std::make_unique<ChunkTask>(start, std::move(work), *task.lane,
                                  static_cast<int>(task.lane->slot()), options_, instruments_);
  if (matching_ == Matching::kByOrder) AddToProgram(&task, start.drain);
}

void IssuerExecutor::AddToProgram(Task* task, bool drain) {
  program_.push_back(task);
  FlushPrevious();
  previous_ = task;
  if (drain) FlushPrevious();
}

// The previous task's later hops are next, whether its first one has been issued by now or not.
void IssuerExecutor::FlushPrevious() {
  if (previous_ == nullptr) return;
  for (int hop = 1; hop < previous_->hops; ++hop) program_.push_back(previous_);
  previous_ = nullptr;
}

// True if the task is not in an exchange; looks whether one has ended.
bool IssuerExecutor::Collect(Task& task) {
  if (!task.in_exchange) return true;
  {
    const absl::MutexLock lock(&mu_);
    if (!task.ended) return false;
    task.ended = false;
  }
  task.in_exchange = false;
  task.exchange.reset();
  task.chunk->OnHopEnded();
  return true;
}

// Advances one task that can go on; false if there is none.
bool IssuerExecutor::Step() {
  for (auto task = tasks_.begin(); task != tasks_.end(); ++task) {
    if (!Collect(*task)) continue;
    if (!task->status.ok()) {
      End(task, std::move(task->status));
      return true;
    }
    if (!IsDue(*task)) continue;
    Advance(*task);
    if (!task->in_exchange) End(task, std::move(task->status));
    return true;
  }
  return false;
}

// A task without hops left only has to be finished, which no order concerns.
bool IssuerExecutor::IsDue(const Task& task) const {
  if (matching_ == Matching::kByTag || task.hops_left == 0) return true;
  return !program_.empty() && program_.front() == &task;
}

void IssuerExecutor::Advance(Task& task) {
  absl::StatusOr<std::unique_ptr<Exchange>> exchange = task.chunk->Advance();
  task.status = exchange.status();
  if (!exchange.ok() || *exchange == nullptr) return;
  if (task.hops_left > 0) {  // else it is the flush, which no order concerns
    if (matching_ == Matching::kByOrder) program_.pop_front();
    --task.hops_left;
  }
  task.in_exchange = true;
  task.exchange = *std::move(exchange);
  task.exchange->OnDone([this, &task](absl::Status status) {
    const absl::MutexLock lock(&mu_);
    task.ended = true;
    task.status = std::move(status);
    ++events_;
  });
}

void IssuerExecutor::End(Tasks::iterator task, absl::Status status) {
  if (previous_ == &*task) previous_ = nullptr;
  std::erase(program_, &*task);  // if it failed
  status = task->chunk->Finish(std::move(status));
  const StartChunk start = task->chunk->start();
  const WorkPtr work = task->chunk->work();
  lanes_.push_back(std::move(task->lane));
  tasks_.erase(task);
  host_.EndChunk(start, work, std::move(status));
}

}  // namespace thinwire
