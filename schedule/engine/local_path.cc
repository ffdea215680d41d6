#include "schedule/engine/local_path.h"

#include <utility>

namespace thinwire {

// The stream is null on the host.
absl::Status LocalPath::RunOn(const InFlight& work, DeviceStream* stream) const {
  Workspaces::Lent space = spaces_.Take(work.bucket->needs(), stream);
  const ChunkJob job = work.JobOf(0, options_);
  absl::Status status =
      job.chunk->algorithm->Begin(job, space.workspace->bench({}))->Advance().status();
  const std::shared_ptr<DeviceEvent> end = stream == nullptr ? nullptr : stream->Record();
  if (end != nullptr) work.order.fence->Set(0, end);
  spaces_.Give(std::move(space), end);
  return status;
}

absl::Status LocalPath::Run(const InFlight& work) {
  if (work.device == nullptr) return RunOn(work, nullptr);
  const std::unique_ptr<DeviceStream> stream = work.device->Adopt(work.stream);
  work.order.fence->HoldBack(*stream);
  const absl::Status status = RunOn(work, stream.get());
  return status.ok() ? stream->status() : status;
}

}  // namespace thinwire
