// Guards for waits while a group comes together: Alarm ends waits that have no deadline of their
// own; GuardedStore ends a store's waits when a peer is lost.
#ifndef THINWIRE_SCHEDULE_JOIN_GUARDS_H_
#define THINWIRE_SCHEDULE_JOIN_GUARDS_H_

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/planes.h"
#include "transport/steady_cond_var.h"
#include "transport/store.h"
#include "transport/threads.h"

namespace thinwire {

// Fails a control plane, which must outlive it, with DeadlineExceeded once a deadline has passed.
// If one of Gloo's own waits timed out instead, Gloo would close all connections, and the rank
// could not tell its peers why.
class Alarm {
 public:
  Alarm(ControlPlane& control, Deadline deadline) {
    absl::StatusOr<std::thread> thread =
        StartThread([this, &control, deadline] { Run(control, deadline); });
    if (thread.ok()) {
      thread_ = *std::move(thread);
    } else {
      control.Abort(absl::Status(thread.status().code(), absl::StrCat("rank ", control.rank(), ": ",
                                                                      thread.status().message())));
    }
  }
  ~Alarm() {
    {
      const absl::MutexLock lock(&mu_);
      over_ = true;
      ended_.SignalAll();
    }
    if (thread_.joinable()) thread_.join();
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  static constexpr std::chrono::milliseconds kPause{10};

  void Run(ControlPlane& control, Deadline deadline) {
    while (!AwaitOver()) {
      if (Clock::now() < deadline) continue;
      control.Abort(absl::DeadlineExceededError("the deadline has passed"));
    }
  }
  bool AwaitOver() {
    const absl::MutexLock lock(&mu_);
    if (!over_) ended_.WaitUntil(&mu_, Clock::now() + kPause);
    return over_;
  }

  absl::Mutex mu_;
  SteadyCondVar ended_;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// A store whose waits end when an already connected group has failed: a store does not report dead
// ranks, but the group's connections do.
class GuardedStore final : public Store {
 public:
  // `group` must outlive it.
  GuardedStore(std::shared_ptr<Store> store, const ControlPlane& group)
      : store_(std::move(store)), group_(group) {}

  absl::Status Set(std::string_view key, std::string_view value) override {
    return store_->Set(key, value);
  }

  // Returns the group's failure if that comes first.
  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    for (;;) {
      const Deadline next = std::min(deadline, Clock::now() + kGlance);
      absl::StatusOr<std::string> value = store_->Get(key, next);
      if (value.ok() || !absl::IsDeadlineExceeded(value.status())) return value;
      if (absl::Status failed = group_.status(); !failed.ok()) return failed;
      if (Clock::now() >= deadline) return value;
    }
  }

 private:
  static constexpr std::chrono::milliseconds kGlance{50};

  const std::shared_ptr<Store> store_;
  const ControlPlane& group_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_GUARDS_H_
