// ChunkTask: a chunk on a lane, from its start to its end, with the clock and the recorder running.
#ifndef THINWIRE_SCHEDULE_ENGINE_CHUNK_TASK_H_
#define THINWIRE_SCHEDULE_ENGINE_CHUNK_TASK_H_

#include <memory>

#include "schedule/engine/flight_recorder.h"
#include "schedule/engine/lane.h"
#include "schedule/engine/stage_clock.h"
#include "schedule/engine/works.h"
#include "schedule/order/outbox.h"

namespace thinwire {

// Where the engine keeps its records.
struct Instruments {
  StageTotals& totals;
  Trace* trace;  // null without one
  FlightRecorder& recorder;
};

// Not thread-safe.
class ChunkTask {
 public:
  // References outlive it. `row`: of a trace, where no other chunk is meanwhile.
  ChunkTask(const StartChunk& start, WorkPtr work, Lane& lane, int row, const Options& options,
            const Instruments& instruments);

  // Works up to the next exchange, and starts it; null: the chunk is done. The last one is the
  // flush of the lane's stream, where the plane has such.
  absl::StatusOr<std::unique_ptr<Exchange>> Advance();
  // The exchange that Advance started has ended.
  void OnHopEnded();

  // Ends the lane's part; with a bad status the lane no longer touches the tensor afterwards.
  absl::Status Finish(absl::Status status);

  const StartChunk& start() const { return start_; }
  const WorkPtr& work() const { return work_; }
  Lane& lane() { return lane_; }
  // The transport's own deadline; the engine's watchdog ends the exchange long before.
  Deadline deadline() const;

 private:
  Workspaces::Lent EnterLane();
  void Expect(const Reception& reception);

  const StartChunk start_;
  const WorkPtr work_;
  Lane& lane_;
  const Options& options_;
  FlightRecorder& recorder_;
  StageClock clock_;
  const ChunkJob job_;
  Workspaces::Lent space_;
  std::unique_ptr<ChunkRun> run_;
  const Hop* hop_ = nullptr;  // under way
  // The exchange of the coming hop, be it the first or a later one, if the plane receives ahead.
  std::unique_ptr<Exchange> expected_;
  uint64_t hops_ = 0;
  bool flushing_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_CHUNK_TASK_H_
