#include "schedule/engine/lane.h"

#include "transport/staged/staged.h"

namespace thinwire {

absl::StatusOr<std::unique_ptr<Lane>> Lane::Make(Device* device, Workspaces& spaces,
                                                 DataPlane& group, size_t slot,
                                                 std::chrono::milliseconds patience) {
  std::unique_ptr<Lane> lane(new Lane(spaces, group, slot, patience));
  if (device == nullptr) return lane;
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device->MakeStream();
  if (!stream.ok()) return stream.status();
  lane->stream_ = *std::move(stream);
  lane->of_stream_ = group.On(*lane->stream_);
  if (lane->of_stream_ == nullptr) {
    absl::StatusOr<std::unique_ptr<Staged>> staged =
        Staged::Make(group, *device, *lane->stream_, spaces.pinned(), patience);
    if (!staged.ok()) return staged.status();
    lane->of_stream_ = *std::move(staged);
  }
  return lane;
}

Workspaces::Lent Lane::Enter(const DeviceOrder& order, const Needs& needs) {
  if (stream_ == nullptr) return spaces_.Take(needs, nullptr);
  stream_->WaitFor(order.ready);
  order.fence->HoldBack(*stream_);
  return spaces_.Take(needs, stream_.get());
}

absl::Status Lane::Leave(const DeviceOrder& order, Workspaces::Lent lent, absl::Status status) {
  std::shared_ptr<DeviceEvent> end;
  if (stream_ != nullptr) {
    end = stream_->Record();
    status = Settle(order, end, std::move(status));
  }
  spaces_.Give(std::move(lent), std::move(end));
  return status;
}

absl::Status Lane::Settle(const DeviceOrder& order, const std::shared_ptr<DeviceEvent>& end,
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

}  // namespace thinwire
