// Lane: the means of one chunk at a time: codecs, a data plane and memory, all of the host, or all
// of one stream of a device. Lanes makes them. ChunkTask runs a chunk on one.
#ifndef THINWIRE_SCHEDULE_ENGINE_LANE_H_
#define THINWIRE_SCHEDULE_ENGINE_LANE_H_

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/chunk_memory.h"
#include "schedule/engine/records.h"
#include "schedule/engine/use.h"
#include "schedule/order/outbox.h"
#include "transport/planes.h"

namespace thinwire {

// One thread at a time uses it.
class Lane {
 public:
  DataPlane& plane() { return of_stream_ ? *of_stream_ : group_; }
  // Its own in every fence.
  int slot() const { return slot_; }
  const Membership& members() const { return group_.members(); }

  // Enter makes the stream wait for the caller's input and for earlier users of this memory, and of
  // the workspace that it returns; Leave records when this work ends, and gives that back. Leave
  // returns the status of it all: where that is bad, the device no longer touches the tensor.
  Workspaces::Lent Enter(const DeviceOrder& order, const ChunkMemory& size);
  absl::Status Leave(const DeviceOrder& order, Workspaces::Lent lent, absl::Status status);

 private:
  friend class Lanes;
  Lane(Workspaces& spaces, DataPlane& group, int slot, std::chrono::milliseconds patience)
      : spaces_(spaces), group_(group), slot_(slot), patience_(patience) {}

  absl::Status AwaitStream(const DeviceOrder& order, const std::shared_ptr<DeviceEvent>& end,
                           absl::Status status);

  Workspaces& spaces_;
  DataPlane& group_;
  const int slot_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  std::unique_ptr<DataPlane> of_stream_;  // null: the host
};

// Thread-safe.
class Lanes {
 public:
  // The device is null for the host. `plane` is the group's data plane, whosever memory its blocks
  // are; null in a world of one, which has workspaces and no lanes. Both outlive this, as this does
  // the lanes.
  Lanes(Device* device, DataPlane* plane, std::chrono::milliseconds patience)
      : device_(device), plane_(plane), patience_(patience), spaces_(device, plane) {}

  absl::StatusOr<std::unique_ptr<Lane>> Make(int slot);

  DataTraits traits() const { return plane_->traits(); }
  Workspaces& spaces() { return spaces_; }

 private:
  Device* const device_;
  DataPlane* const plane_;
  const std::chrono::milliseconds patience_;
  Workspaces spaces_;
};

// A chunk on a lane, from its start to its end, with the clock and the recorder running. Not
// thread-safe.
class ChunkTask {
 public:
  // References outlive it. `row`: of a trace, where no other chunk is meanwhile.
  ChunkTask(StartChunk start, Lane& lane, int row, const Options& options, Records& records);

  // Works up to the next exchange, and starts it; null: the chunk is done. The last one is the
  // flush of the lane's stream, where the plane has such.
  absl::StatusOr<std::unique_ptr<Exchange>> Advance();
  // The exchange that Advance started has ended.
  void OnHopEnded();
  // Ends an exchange, and all that follow it, on this thread. Returns the chunk's status.
  absl::Status WaitFrom(absl::StatusOr<std::unique_ptr<Exchange>> exchange);

  // Ends the lane's part; with a bad status the lane no longer touches the tensor afterwards.
  absl::Status Finish(absl::Status status);

  const StartChunk& start() const { return start_; }

 private:
  Workspaces::Lent EnterLane();
  void Expect(const Reception& reception);

  const StartChunk start_;
  const Use& use_;  // of the start, which keeps it alive
  Lane& lane_;
  const Options& options_;
  Records& records_;
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

#endif  // THINWIRE_SCHEDULE_ENGINE_LANE_H_
