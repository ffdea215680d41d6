// Lane: what a thread of a group works with: codecs, a transport and memory, all of the host, or
// all of one stream of a device.
#ifndef THINWIRE_SCHEDULE_LANE_H_
#define THINWIRE_SCHEDULE_LANE_H_

#include <chrono>
#include <memory>

#include "compress/backend.h"
#include "compress/device.h"
#include "schedule/lane_buffers.h"
#include "transport/staged.h"

namespace thinwire {

// When a tensor on a device may be touched, and when it is done. Null members on the host.
struct DeviceOrder {
  std::shared_ptr<DeviceEvent> ready;  // the caller's work on the input
  std::shared_ptr<Fence> fence;        // ours on input, output, residual and momentum
};

class Lane {
 public:
  // `slot`: the lane's own in every fence. The device is null, and the references outlive the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Make(Device* device, Transport& host, size_t slot,
                                                    std::chrono::milliseconds patience);

  const Backend& backend() const { return stream_ ? stream_->backend() : CpuBackend(); }
  Transport& transport() { return staged_ ? *staged_ : host_; }
  LaneBuffers& buffers() { return buffers_; }

  // What the lane does between the two comes after what the order waits for, and before what waits
  // for the order. Leave returns the status of it all: where that is bad, the device no longer
  // touches the tensor.
  void Enter(const DeviceOrder& order);
  absl::Status Leave(const DeviceOrder& order, absl::Status status);

 private:
  Lane(Device* device, Transport& host, size_t slot, std::chrono::milliseconds patience)
      : host_(host), slot_(slot), patience_(patience), buffers_(device) {}

  Transport& host_;
  const size_t slot_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<DeviceStream> stream_;  // null: the host
  LaneBuffers buffers_;                   // freed before the stream, and after what uses them
  std::unique_ptr<Staged> staged_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_LANE_H_
