#include "schedule/engine/raw_path.h"

#include <utility>

namespace thinwire {

RawPath::RawPath(std::unique_ptr<Lane> lane, Device* device, const Options& options,
                 StageTotals& totals, RawHost& host)
    : lane_(std::move(lane)), device_(device), options_(options), totals_(totals), host_(host) {
  threads_.emplace_back([this] { FinishLoop(); });
  if (device_ != nullptr) threads_.emplace_back([this] { PostLoop(); });
}

RawPath::~RawPath() {
  Close();
  for (std::thread& thread : threads_) thread.join();
}

void RawPath::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
}

void RawPath::Start(const WorkPtr& work, bool caller_waits) {
  if (device_ != nullptr) return PushTo(&to_post_, work);
  if (caller_waits) {
    work->finish_raw = [this, weak = std::weak_ptr(work)] {
      if (const WorkPtr alive = weak.lock()) Finish(alive);
    };
  }
  Post(work);
}

std::unique_ptr<Scratch> RawPath::TakeScratch() {
  const absl::MutexLock lock(&mu_);
  if (spare_.empty()) return std::make_unique<Scratch>(device_);
  std::unique_ptr<Scratch> scratch = std::move(spare_.back());
  spare_.pop_back();
  return scratch;
}

// Both ends post at once, so that ranks that come in other orders can't block one another.
void RawPath::Post(const WorkPtr& work) {
  InFlight::RawState& raw = work->raw;
  {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;  // Abandon ends it
    raw.begun = true;
  }
  raw.scratch = TakeScratch();
  lane_->Enter(work->order);
  const ChunkJob job = work->JobOf(0, options_);
  raw.run = job.chunk->algorithm->Begin(job, lane_->bench_with(*raw.scratch));
  const absl::StatusOr<const Hop*> hop = raw.run->Advance();
  if (hop.ok()) raw.exchange = lane_->plane().Start((*hop)->tag, (*hop)->send, (*hop)->recv);
  raw.status = hop.status();
  bool closed;
  {
    const absl::MutexLock lock(&mu_);
    raw.posted = true;
    closed = closed_;
  }
  if (closed) {
    Finish(work);  // the failure came before it could see the exchange
  } else if (!work->finish_raw) {
    PushTo(&to_finish_, work);
  }
}

void RawPath::Finish(const WorkPtr& work) {
  {
    const absl::MutexLock lock(&mu_);
    if (!work->raw.posted || std::exchange(work->raw.claimed, true)) return;
  }
  absl::Status status = lane_->Leave(work->order, Await(*work));
  totals_.Add(Stage::kExchange, Clock::now() - work->submitted);
  work->raw.run.reset();
  work->raw.exchange.reset();
  if (status.ok()) {
    const absl::MutexLock lock(&mu_);
    spare_.push_back(std::move(work->raw.scratch));
  }
  host_.EndRaw(work, std::move(status));
}

// The watchdog ends the exchange long before the plane's own deadline would.
absl::Status RawPath::Await(InFlight& work) {
  if (!work.raw.status.ok()) return work.raw.status;
  const Deadline deadline = work.deadline + options_.timeout;
  if (absl::Status status = work.raw.exchange->Wait(deadline); !status.ok()) return status;
  return work.raw.run->Advance().status();
}

void RawPath::Abandon(const WorkPtr& work) {
  bool begun;
  {
    const absl::MutexLock lock(&mu_);
    begun = work->raw.begun;
  }
  if (begun) return Finish(work);
  host_.EndRaw(work, absl::CancelledError("the group has failed"));
}

void RawPath::PushTo(Queue* queue, const WorkPtr& work) {
  const absl::MutexLock lock(&mu_);
  queue->Push(work);
}

void RawPath::PostLoop() {
  for (;;) {
    WorkPtr work;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &RawPath::MayPost));
      if (closed_) return;
      work = to_post_.Pop();
    }
    Post(work);
  }
}

void RawPath::FinishLoop() {
  for (;;) {
    WorkPtr work;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &RawPath::MayFinish));
      if (closed_) return;
      work = to_finish_.Pop();
    }
    Finish(work);
  }
}

}  // namespace thinwire
