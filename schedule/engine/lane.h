// Lane: the means of one chunk at a time: codecs, a data plane and memory, all of the host, or all
// of one stream of a device.
#ifndef THINWIRE_SCHEDULE_ENGINE_LANE_H_
#define THINWIRE_SCHEDULE_ENGINE_LANE_H_

#include <chrono>
#include <memory>

#include "compress/backend.h"
#include "compress/device.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/workspace.h"
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
  // `slot`: the lane's own in every fence. The device is null for the host, and the workspaces are
  // of the same. `group` is the group's data plane, whosever memory its blocks are. The references
  // outlive the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Make(Device* device, Workspaces& spaces,
                                                    DataPlane& group, size_t slot,
                                                    std::chrono::milliseconds patience);

  DataPlane& plane() { return of_stream_ ? *of_stream_ : group_; }
  size_t slot() const { return slot_; }
  const Membership& members() const { return group_.members(); }

  // Enter makes the stream wait for the caller's input and for earlier users of this memory, and of
  // the workspace that it returns; Leave records when this work ends, and gives that back. Leave
  // returns the status of it all: where that is bad, the device no longer touches the tensor.
  Workspaces::Lent Enter(const DeviceOrder& order, const Needs& needs);
  absl::Status Leave(const DeviceOrder& order, Workspaces::Lent lent, absl::Status status);

 private:
  Lane(Workspaces& spaces, DataPlane& group, size_t slot, std::chrono::milliseconds patience)
      : spaces_(spaces), group_(group), slot_(slot), patience_(patience) {}

  absl::Status Settle(const DeviceOrder& order, const std::shared_ptr<DeviceEvent>& end,
                      absl::Status status);

  Workspaces& spaces_;
  DataPlane& group_;
  const size_t slot_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  std::unique_ptr<DataPlane> of_stream_;  // null: the host
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LANE_H_
