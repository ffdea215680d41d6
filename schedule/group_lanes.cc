// The threads that move data.
#include "schedule/group.h"
#include "schedule/hash.h"

namespace thinwire {

void Group::LaneLoop(int lane) {
  while (const std::optional<Announcement> announcement = announced_.Pop()) {
    RunChunk(*lanes_[lane], lane, *announcement);
  }
}

void Group::RunChunk(Lane& lane, int number, const Announcement& announcement) {
  WorkPtr work;
  {
    const std::lock_guard lock(mu_);
    const auto found = works_.find(announcement.id);
    if (!status_.ok() || found == works_.end()) return;  // failed meanwhile
    work = found->second;
    ++work->chunks_running;
  }
  StageClock clock(&totals_, trace_.get(), number, work->name, announcement.chunk, work->submitted);
  clock.End(Stage::kQueue);
  const Chunk& chunk = work->plan->chunks[announcement.chunk];
  CodecPair codec = options_.codecs[chunk.codec];
  codec.up = codec.up.AtStep(work->step);
  const ChunkJob job{.tag = HashCombine(work->id(), announcement.chunk),
                     .codec = codec,
                     .chunk = &chunk,
                     .input = work->input,
                     .output = work->output,
                     .residual = codec.uses_feedback() ? work->memory.residual.get() : nullptr,
                     .velocity = work->memory.momentum.get(),
                     .momentum = options_.momentum,
                     .absent = work->absent,
                     .scale = work->scale,
                     .threshold = &work->thresholds[announcement.chunk],
                     .tensor = work->report.key,
                     .step = work->step,
                     // The watchdog ends it long before.
                     .deadline = work->deadline + options_.timeout};
  lane.Enter(work->order);
  absl::Status status =
      AllReduceChunk(job, lane.backend(), lane.transport(), lane.buffers(), clock);
  status = lane.Leave(work->order, std::move(status));
  if (!status.ok()) FailFromTransport(status, work->name);
  EndChunk(work, status);
}

void Group::EndChunk(const WorkPtr& work, const absl::Status& status) {
  bool done, failed;
  {
    const std::lock_guard lock(mu_);
    --work->chunks_running;
    if (status.ok()) --work->chunks_left;
    done = work->chunks_left == 0;
    failed = !status_.ok() && work->chunks_running == 0;
  }
  if (rank_ == 0 && status.ok()) {
    const std::lock_guard lock(order_mu_);
    leader_.OnChunkDone(work->id());
    if (done) ForgetLocked(work->id());
    AnnounceLocked();
  }
  if (done || failed) Retire(work, done ? Outcome::kDone : Outcome::kFailed);
}

void Group::RawLoop() {
  while (const std::optional<WorkPtr> work = raw_.Pop()) FinishRaw(*work);
}

void Group::PostLoop() {
  while (const std::optional<WorkPtr> work = posts_.Pop()) PostRaw(*work);
}

}  // namespace thinwire
