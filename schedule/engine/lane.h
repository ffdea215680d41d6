// Lane: the means of one chunk at a time: codecs, a data plane and memory, all of the host, or all
// of one stream of a device.
#ifndef THINWIRE_SCHEDULE_ENGINE_LANE_H_
#define THINWIRE_SCHEDULE_ENGINE_LANE_H_

#include <chrono>
#include <memory>

#include "compress/backend.h"
#include "compress/device.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/scratch.h"
#include "transport/data_plane.h"

namespace thinwire {

// When a tensor on a device may be touched, and when it is done. Null members on the host.
struct DeviceOrder {
  std::shared_ptr<DeviceEvent> ready;  // the caller's work on the input
  std::shared_ptr<Fence> fence;        // the engine's work on input, output, residual and momentum
};

// One thread at a time uses it.
class Lane {
 public:
  // `slot`: the lane's own in every fence. The device is null for the host. `group` is the group's
  // data plane, whosever memory its blocks are. The references outlive the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Make(Device* device, DataPlane& group, size_t slot,
                                                    std::chrono::milliseconds patience);

  const Backend& backend() const { return stream_ ? stream_->backend() : CpuBackend(); }
  DataPlane& plane() { return of_stream_ ? *of_stream_ : group_; }
  size_t slot() const { return slot_; }
  Bench bench() { return bench_with(scratch_); }
  Bench bench_with(Scratch& scratch) { return {backend(), scratch, group_.members()}; }

  // Enter makes the stream wait for the caller's input and for earlier users of this memory; Leave
  // records when this work ends. Leave returns the status of it all: where that is bad, the device
  // no longer touches the tensor.
  void Enter(const DeviceOrder& order);
  absl::Status Leave(const DeviceOrder& order, absl::Status status);

 private:
  Lane(Device* device, DataPlane& group, size_t slot, std::chrono::milliseconds patience)
      : group_(group), slot_(slot), patience_(patience), scratch_(device) {}

  DataPlane& group_;
  const size_t slot_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  Scratch scratch_;                       // freed before the stream, and after what uses it
  std::unique_ptr<DataPlane> of_stream_;  // null: the host
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LANE_H_
