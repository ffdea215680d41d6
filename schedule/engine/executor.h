// Executor: runs chunks in the order in which the sequencer starts them. Everything that follows a
// chunk (windows, priorities, errors) goes by its completion, which comes to the ChunkHost, not by
// the return of Start.
#ifndef THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/engine/lane.h"
#include "schedule/engine/works.h"
#include "schedule/order/outbox.h"

namespace thinwire {

// Where an executor's chunks come from and go to. Called from the executor's threads.
class ChunkHost {
 public:
  virtual ~ChunkHost() = default;
  // The work whose chunk begins; null if the group has failed meanwhile.
  virtual WorkPtr BeginChunk(const StartChunk& start) = 0;
  // The chunk is done, or has failed. Called once for every work that BeginChunk gave.
  virtual void EndChunk(const StartChunk& start, const WorkPtr& work, absl::Status status) = 0;
};

// Makes the lane with that number, from 0.
using LaneMaker = std::function<absl::StatusOr<std::unique_ptr<Lane>>(int)>;

class Executor {
 public:
  virtual ~Executor() = default;  // after Close; joins its threads

  // Queues the chunk and returns. Thread-safe.
  virtual void Start(const StartChunk& start) = 0;

  // Starts nothing more. Chunks on their way end when the data plane is aborted.
  virtual void Close() = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
