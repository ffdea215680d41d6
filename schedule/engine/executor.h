// Executor: runs chunks in the order in which the sequencer starts them. Everything that follows a
// chunk (windows, priorities, errors) goes by its completion, which comes to the ChunkHost, not by
// the return of Start.
#ifndef THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
#define THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_

#include "absl/status/status.h"
#include "schedule/order/outbox.h"

namespace thinwire {

// Hears of chunks. Called from the threads that run them.
class ChunkHost {
 public:
  virtual ~ChunkHost() = default;
  // The chunk is done, or has failed. Called once for every chunk that its use let begin.
  virtual void EndChunk(const StartChunk& start, absl::Status status) = 0;
  // No more chunks can be run.
  virtual void FailGroup(absl::Status reason) = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;  // after Close; joins its threads

  // Makes the lanes of announced chunks. Once, and before Start. Fails with the device.
  virtual absl::Status Begin() = 0;

  // Queues the chunk and returns. Its host is its Use. Thread-safe.
  virtual void Start(const StartChunk& start) = 0;

  // Starts nothing more. Chunks on their way end when the data plane is aborted.
  virtual void Close() = 0;
};

// A lane's slot in fences: those of announced chunks come first, then the direct path's, then those
// of predicted chunks.
inline int SlotOfLane(int number, int announced) {
  return number < announced ? number : number + 1;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_EXECUTOR_H_
