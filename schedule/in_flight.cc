#include "schedule/in_flight.h"

#include <utility>

namespace thinwire {

void InFlight::Complete(absl::Status status) {
  const std::lock_guard lock(mu_);
  done_ = true;
  status_ = std::move(status);
  changed_.notify_all();
}

absl::Status InFlight::WaitOn(void* later) {
  if (finish_raw && !done()) finish_raw();
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return done_; });
  if (!status_.ok() || order.fence == nullptr) return status_;
  const std::unique_ptr<DeviceStream> stream = device->Adopt(later);
  order.fence->HoldBack(*stream);
  return stream->status();
}

bool InFlight::done() const {
  const std::lock_guard lock(mu_);
  return done_;
}

std::shared_ptr<Work> DoneWork() {
  auto work = std::make_shared<InFlight>();
  work->Complete(absl::OkStatus());
  return work;
}

}  // namespace thinwire
