#include "schedule/engine/lane.h"

#include "transport/staged/staged.h"

namespace thinwire {

absl::StatusOr<std::unique_ptr<Lane>> Lane::Make(Device* device, DataPlane& group, size_t slot,
                                                 std::chrono::milliseconds patience) {
  std::unique_ptr<Lane> lane(new Lane(device, group, slot, patience));
  if (device == nullptr) return lane;
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device->MakeStream();
  if (!stream.ok()) return stream.status();
  lane->stream_ = *std::move(stream);
  lane->of_stream_ = group.On(*lane->stream_);
  if (lane->of_stream_ == nullptr) {
    absl::StatusOr<std::unique_ptr<Staged>> staged =
        Staged::Make(group, *device, *lane->stream_, patience);
    if (!staged.ok()) return staged.status();
    lane->of_stream_ = *std::move(staged);
  }
  return lane;
}

void Lane::Enter(const DeviceOrder& order) {
  if (stream_ == nullptr) return;
  stream_->WaitFor(order.ready);
  order.fence->HoldBack(*stream_);
}

absl::Status Lane::Leave(const DeviceOrder& order, absl::Status status) {
  if (stream_ == nullptr) return status;
  if (status.ok()) {
    order.fence->Set(slot_, stream_->Record());
    status = stream_->status();
  }
  if (status.ok()) return status;
  // A stream that waits for peers comes to its end only when its plane has failed.
  if (group_.traits().memory == Memory::kStream) group_.Abort(status);
  stream_->Synchronize(Clock::now() + patience_).IgnoreError();
  return status;
}

}  // namespace thinwire
