// Ticker: a thread that does something every few milliseconds, from its construction to its end.
#ifndef THINWIRE_TRANSPORT_TICKER_H_
#define THINWIRE_TRANSPORT_TICKER_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace thinwire {

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

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_TICKER_H_
