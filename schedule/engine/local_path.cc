#include "schedule/engine/local_path.h"

#include <utility>

namespace thinwire {

std::unique_ptr<Scratch> LocalPath::TakeScratch(Device* device) {
  const absl::MutexLock lock(&mu_);
  if (spare_.empty()) return std::make_unique<Scratch>(device);
  std::unique_ptr<Scratch> scratch = std::move(spare_.back());
  spare_.pop_back();
  return scratch;
}

absl::Status LocalPath::RunOn(const InFlight& work, const Backend& backend,
                              Scratch& scratch) const {
  const ChunkJob job = work.JobOf(0, options_);
  return job.chunk->algorithm->Begin(job, {backend, scratch, {}})->Advance().status();
}

absl::Status LocalPath::Run(const InFlight& work) {
  std::unique_ptr<Scratch> scratch = TakeScratch(work.device.get());
  absl::Status status;
  if (work.device == nullptr) {
    status = RunOn(work, CpuBackend(), *scratch);
  } else {
    const std::unique_ptr<DeviceStream> stream = work.device->Adopt(work.stream);
    work.order.fence->HoldBack(*stream);
    status = RunOn(work, stream->backend(), *scratch);
    work.order.fence->Set(0, stream->Record());
    if (status.ok()) status = stream->status();
  }
  const absl::MutexLock lock(&mu_);
  spare_.push_back(std::move(scratch));
  return status;
}

}  // namespace thinwire
