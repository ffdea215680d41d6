#include "schedule/engine/lane.h"

#include <utility>

#include "schedule/engine/ending.h"
#include "transport/staged/staged.h"

namespace thinwire {

absl::StatusOr<std::unique_ptr<Lane>> Lanes::Make(int slot) {
  std::unique_ptr<Lane> lane(new Lane(spaces_, *plane_, slot, patience_));
  if (device_ == nullptr) return lane;
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device_->MakeStream();
  if (!stream.ok()) return stream.status();
  lane->stream_ = *std::move(stream);
  if (StreamPlane* const streams = plane_->of_streams()) {
    lane->of_stream_ = streams->On(*lane->stream_);
  } else {
    absl::StatusOr<std::unique_ptr<Staged>> staged =
        Staged::Make(*plane_, *device_, *lane->stream_, spaces_.pinned(), patience_);
    if (!staged.ok()) return staged.status();
    lane->of_stream_ = *std::move(staged);
  }
  return lane;
}

Workspaces::Lent Lane::Enter(const DeviceOrder& order, const ChunkMemory& size) {
  if (stream_ == nullptr) return spaces_.Take(size, nullptr);
  stream_->WaitFor(order.ready);
  order.fence->HoldBack(*stream_);
  return spaces_.Take(size, stream_.get());
}

absl::Status Lane::Leave(const DeviceOrder& order, Workspaces::Lent lent, absl::Status status) {
  std::shared_ptr<DeviceEvent> end;
  if (stream_ != nullptr) {
    end = stream_->Record();
    status = AwaitStream(order, end, std::move(status));
  }
  spaces_.Give(std::move(lent), std::move(end));
  return status;
}

absl::Status Lane::AwaitStream(const DeviceOrder& order, const std::shared_ptr<DeviceEvent>& end,
                               absl::Status status) {
  if (status.ok()) {
    order.fence->Set(slot_, end);
    status = stream_->status();
  }
  if (status.ok()) return status;
  // A stream that waits for peers comes to its end only when its plane has failed.
  if (group_.traits().memory == Memory::kStream) group_.Abort(status);
  stream_->Synchronize(Clock::now() + patience_).IgnoreError();
  return status;
}

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
  run_ = job_.chunk->algorithm->Begin(job_, space_.workspace->bench(lane_.members()));
  Expect(run_->first());
}

Workspaces::Lent ChunkTask::EnterLane() {
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

}  // namespace thinwire
