#include "schedule/engine/direct_path.h"

#include <utility>

namespace thinwire {

DirectPath::DirectPath(std::unique_ptr<Lane> lane, bool on_device, const Options& options,
                       StageTotals& totals, DirectHost& host)
    : lane_(std::move(lane)),
      on_device_(on_device),
      options_(options),
      totals_(totals),
      host_(host) {
  threads_.emplace_back([this] { FinishLoop(); });
  if (on_device_) threads_.emplace_back([this] { PostLoop(); });
}

DirectPath::~DirectPath() {
  Close();
  for (std::thread& thread : threads_) thread.join();
}

void DirectPath::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
}

void DirectPath::Start(const WorkPtr& work, bool caller_waits) {
  work->finisher = this;
  if (on_device_) return PushTo(&to_post_, work);
  Post(work);
  if (!caller_waits) PushTo(&to_finish_, work);
}

// A work is posted soon, since that waits for no peer.
void DirectPath::Help(const WorkPtr& work) {
  {
    const auto is_posted = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return closed_ || work->direct.posted;
    };
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&is_posted));
  }
  Finish(work);
}

// Both ends post at once, so that ranks that come in other orders can't block one another.
void DirectPath::Post(const WorkPtr& work) {
  InFlight::DirectState& direct = work->direct;
  {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;  // Abandon ends it
    direct.begun = true;
  }
  direct.space = lane_->Enter(work->order, work->bucket->needs());
  const ChunkJob job = work->JobOf(0, options_);
  direct.run = job.chunk->algorithm->Begin(job, direct.space.workspace->bench(lane_->members()));
  const absl::StatusOr<const Hop*> hop = direct.run->Advance();
  if (hop.ok()) direct.exchange = lane_->plane().Start((*hop)->tag, (*hop)->send, (*hop)->recv);
  direct.status = hop.status();
  bool closed;
  {
    const absl::MutexLock lock(&mu_);
    direct.posted = true;
    closed = closed_;
  }
  if (closed) Finish(work);  // the failure came before it could see the exchange
}

void DirectPath::Finish(const WorkPtr& work) {
  {
    const absl::MutexLock lock(&mu_);
    if (!work->direct.posted || std::exchange(work->direct.claimed, true)) return;
  }
  absl::Status status = Await(*work);
  work->direct.run.reset();
  work->direct.exchange.reset();
  status = lane_->Leave(work->order, std::move(work->direct.space), std::move(status));
  totals_.Add(Stage::kExchange, Clock::now() - work->submitted);
  host_.EndDirect(work, std::move(status));
}

// The watchdog ends the exchange long before the plane's own deadline would.
absl::Status DirectPath::Await(InFlight& work) {
  if (!work.direct.status.ok()) return work.direct.status;
  const Deadline deadline = work.deadline + options_.timeout;
  if (absl::Status status = work.direct.exchange->Wait(deadline); !status.ok()) return status;
  return work.direct.run->Advance().status();
}

void DirectPath::Abandon(const WorkPtr& work) {
  bool begun;
  {
    const absl::MutexLock lock(&mu_);
    begun = work->direct.begun;
  }
  if (begun) return Finish(work);
  host_.EndDirect(work, absl::CancelledError("the group has failed"));
}

void DirectPath::PushTo(Queue* queue, const WorkPtr& work) {
  const absl::MutexLock lock(&mu_);
  queue->Push(work);
}

void DirectPath::PostLoop() {
  for (;;) {
    WorkPtr work;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &DirectPath::MayPost));
      if (closed_) return;
      work = to_post_.Pop();
    }
    Post(work);
    PushTo(&to_finish_, work);
  }
}

void DirectPath::FinishLoop() {
  for (;;) {
    WorkPtr work;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &DirectPath::MayFinish));
      if (closed_) return;
      work = to_finish_.Pop();
    }
    Finish(work);
  }
}

}  // namespace thinwire
