// FailureLink: makes the failure of a control plane that of a data plane over other connections,
// while nobody receives the control plane's frames yet.
#ifndef THINWIRE_TRANSPORT_FAILURE_LINK_H_
#define THINWIRE_TRANSPORT_FAILURE_LINK_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/control_plane.h"
#include "transport/data_plane.h"

namespace thinwire {

// A thread that calls a function every 10 ms, from its construction to its end.
class Ticker {
 public:
  explicit Ticker(std::function<void()> tick)
      : tick_(std::move(tick)), thread_([this] { Run(); }) {}
  ~Ticker() {
    {
      const absl::MutexLock lock(&mu_);
      over_ = true;
    }
    thread_.join();
  }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

 private:
  static constexpr absl::Duration kPause = absl::Milliseconds(10);

  void Run() {
    while (!AwaitOver()) tick_();
  }
  bool AwaitOver() {
    const absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&over_), kPause);
  }

  const std::function<void()> tick_;
  absl::Mutex mu_;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Both planes must outlive it. A peer that is gone ends the data plane's waits within moments.
class FailureLink {
 public:
  FailureLink(const ControlPlane& control, DataPlane& data)
      : ticker_([&control, &data] {
          if (absl::Status failure = control.status(); !failure.ok()) data.Abort(failure);
        }) {}

 private:
  Ticker ticker_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_FAILURE_LINK_H_
