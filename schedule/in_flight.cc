#include "schedule/in_flight.h"

#include <utility>

namespace thinwire {

void InFlight::Complete(absl::Status status) {
  const std::lock_guard lock(mu_);
  done_ = true;
  status_ = std::move(status);
  changed_.notify_all();
}

absl::Status InFlight::Wait() {
  if (finish_raw && !done()) finish_raw();
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return done_; });
  return status_;
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
