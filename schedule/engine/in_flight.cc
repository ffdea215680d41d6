#include "schedule/engine/in_flight.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/engine/checks.h"
#include "schedule/hash.h"

namespace thinwire {

ChunkJob InFlight::JobOf(uint32_t number, const Options& options) const {
  const Chunk& chunk = bucket->partition().chunks[number];
  CodecPair codec = options.codecs[chunk.codec];
  codec.up = codec.up.AtStep(step);
  const bool feedback = codec.uses_feedback() && chunk.algorithm->keeps_residuals();
  return {.tag = bucket->TagOf(id(), number),
          .codec = codec,
          .chunk = &chunk,
          .input = input,
          .output = output,
          .residual = feedback ? memory.residual.get() : nullptr,
          .velocity = memory.momentum.get(),
          .momentum = options.momentum,
          .undo = memory.undo.get(),
          .absent = absent,
          .scale = bucket->scale(),
          .carried = memory.carried == nullptr ? nullptr : memory.carried.get() + number,
          .tensor = report.key,
          .step = step};
}

void InFlight::Renew() {
  finisher = nullptr;
  const absl::MutexLock lock(&mu_);
  done_ = false;
  status_ = absl::OkStatus();
}

void InFlight::Complete(absl::Status status) {
  const absl::MutexLock lock(&mu_);
  done_ = true;
  status_ = std::move(status);
}

absl::Status InFlight::WaitOn(void* later) {
  if (finisher != nullptr && !done()) finisher->Help(shared_from_this());
  std::shared_ptr<Fence> fence;
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
    if (!status_.ok() || order.fence == nullptr) return status_;
    fence = order.fence;
  }
  const std::unique_ptr<DeviceStream> caller = device->Adopt(later);
  if (absl::Status status = CheckNotCaptured(*caller, absl::StrCat("tensor '", label, "'"));
      !status.ok()) {
    return status;
  }
  fence->HoldBack(*caller);
  return caller->status();
}

bool InFlight::done() const {
  const absl::MutexLock lock(&mu_);
  return done_;
}

std::shared_ptr<Work> DoneWork() {
  auto work = std::make_shared<InFlight>();
  work->Complete(absl::OkStatus());
  return work;
}

}  // namespace thinwire
