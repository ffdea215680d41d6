#include "schedule/engine/chunk_task.h"

#include <utility>

#include "schedule/engine/failure.h"

namespace thinwire {

ChunkTask::ChunkTask(const StartChunk& start, WorkPtr work, Lane& lane, int row,
                     const Options& options, const Instruments& instruments)
    : start_(start),
      work_(std::move(work)),
      lane_(lane),
      options_(options),
      recorder_(instruments.recorder),
      clock_(&instruments.totals, instruments.trace, row, work_->label, start.chunk,
             work_->submitted),
      job_(work_->JobOf(start.chunk, options)),
      space_(EnterLane()) {
  run_ = job_.chunk->algorithm->Begin(job_, space_.workspace->bench(lane_.members()));
  Expect(run_->first());
}

Workspaces::Lent ChunkTask::EnterLane() {
  recorder_.Record(FlightEvent::kStarted, work_->label, start_.chunk, 0, start_.predicted ? 1 : 0);
  clock_.End(Stage::kQueue);
  return lane_.Enter(work_->order, work_->bucket->needs());
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
    return lane_.plane().Flush();
  }
  recorder_.Record(FlightEvent::kHopBegun, work_->label, start_.chunk, 0, ++hops_);
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
  recorder_.Record(FlightEvent::kHopEnded, work_->label, start_.chunk, 0, hops_);
}

absl::Status ChunkTask::Finish(absl::Status status) {
  if (expected_ != nullptr) {  // it failed half-way, and the next hop would write into its memory
    lane_.plane().Abort(OfTensor(work_->label, status));
    expected_.reset();
  }
  run_.reset();
  status = lane_.Leave(work_->order, std::move(space_), std::move(status));
  recorder_.Record(FlightEvent::kChunkDone, work_->label, start_.chunk);
  return status;
}

Deadline ChunkTask::deadline() const { return work_->deadline + options_.timeout; }

}  // namespace thinwire
