// A condition variable for absl::Mutex whose deadlines use the steady clock.
#ifndef THINWIRE_TRANSPORT_STEADY_COND_VAR_H_
#define THINWIRE_TRANSPORT_STEADY_COND_VAR_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {

// The timed waits of absl::CondVar and absl::Mutex use the system's clock in Abseil 20220623. If
// that is set back by an hour, a wait of 20 ms that has begun takes an hour, and a thread that
// waits like that to enforce timeouts notices none for that long. std::condition_variable uses the
// steady clock, but takes no absl::Mutex.
class SteadyCondVar {
 public:
  // Both may return early. The caller holds mu, and checks its condition and the clock.
  void WaitUntil(absl::Mutex* mu, std::chrono::steady_clock::time_point deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(inner_);  // before mu is free, so no signal is missed
    mu->Unlock();
    changed_.wait_until(lock, deadline);
    lock.unlock();  // whoever signals holds mu
    mu->Lock();
  }

  void Wait(absl::Mutex* mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    WaitUntil(mu, std::chrono::steady_clock::time_point::max());
  }

  // The caller holds the mutex of the waiting threads, so that they may destroy this once they have
  // it.
  void SignalAll() {
    const std::lock_guard<std::mutex> lock(inner_);
    changed_.notify_all();
  }

 private:
  std::mutex inner_;
  std::condition_variable changed_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_STEADY_COND_VAR_H_
