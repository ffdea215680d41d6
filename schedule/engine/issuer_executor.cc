#include "schedule/engine/issuer_executor.h"

#include <algorithm>
#include <utility>

namespace thinwire {

IssuerExecutor::IssuerExecutor(Lanes& lanes, const Options& options, Records& records,
                               ChunkHost& host)
    : lanes_(lanes),
      matching_(lanes.traits().matching),
      options_(options),
      records_(records),
      host_(host) {}

IssuerExecutor::~IssuerExecutor() {
  Close();
  if (thread_.joinable()) thread_.join();
}

absl::Status IssuerExecutor::Begin() {
  while (lanes_made_ < options_.lanes) {
    if (absl::Status status = AddLane(); !status.ok()) return status;
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::Status IssuerExecutor::AddLane() {
  absl::StatusOr<std::unique_ptr<Lane>> lane = lanes_.Make(SlotOfLane(lanes_made_, options_.lanes));
  if (!lane.ok()) return lane.status();
  ++lanes_made_;
  free_.push_back(*std::move(lane));
  return absl::OkStatus();
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
    for (StartChunk& start : started) Admit(std::move(start));
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

void IssuerExecutor::Admit(StartChunk start) {
  Use& use = UseOf(start);
  if (!use.BeginChunk()) return;  // the group has failed
  if (free_.empty()) {
    if (absl::Status status = AddLane(); !status.ok()) {
      return host_.EndChunk(start, std::move(status));
    }
  }
  Task& task = tasks_.emplace_back();
  task.lane = std::move(free_.back());
  free_.pop_back();
  task.hops = task.hops_left = use.bucket->partition().chunks[start.chunk].algorithm->hops();
  const bool drain = start.drain;
  task.chunk = std::make_unique<ChunkTask>(std::move(start), *task.lane, task.lane->slot(),
                                           options_, records_);
  if (matching_ == Matching::kByOrder) AddToProgram(&task, drain);
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
  free_.push_back(std::move(task->lane));
  tasks_.erase(task);
  host_.EndChunk(start, std::move(status));
}

}  // namespace thinwire
