// The order of work on the host's devices: threads as streams, and their events.
#ifndef THINWIRE_TESTS_HOST_DEVICE_HOST_STREAM_H_
#define THINWIRE_TESTS_HOST_DEVICE_HOST_STREAM_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire::kernels {

// A point in a stream's work, which others can wait for.
class HostPoint {
 public:
  void Reach() {
    const absl::MutexLock lock(&mu_);
    reached_ = true;
  }
  void Await() {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&reached_));
  }
  bool reached() {
    const absl::MutexLock lock(&mu_);
    return reached_;
  }

 private:
  absl::Mutex mu_;
  bool reached_ ABSL_GUARDED_BY(mu_) = false;
};

using HostPointPtr = std::shared_ptr<HostPoint>;

// Stands for the point at which it was recorded last. As in CUDA, it may be recorded again while
// streams still wait for the earlier point.
class HostEvent {
 public:
  HostEvent() { point_->Reach(); }  // waits for an event that was never recorded return at once

  HostPointPtr Record() {
    const absl::MutexLock lock(&mu_);
    return point_ = std::make_shared<HostPoint>();
  }
  HostPointPtr last() {
    const absl::MutexLock lock(&mu_);
    return point_;
  }

 private:
  absl::Mutex mu_;
  HostPointPtr point_ ABSL_GUARDED_BY(mu_) = std::make_shared<HostPoint>();
};

using HostEventPtr = std::shared_ptr<HostEvent>;

// A thread that runs the work it is given, in order.
class HostStream {
 public:
  HostStream() : thread_([this] { Run(); }) {}
  ~HostStream() {
    Push(nullptr);
    thread_.join();
  }

  void Push(std::function<void()> work) {
    const absl::MutexLock lock(&mu_);
    queue_.push_back(std::move(work));
  }

  void Drain() {
    if (idle()) return;
    const auto done = std::make_shared<HostPoint>();
    Push([done] { done->Reach(); });
    done->Await();
  }

 private:
  void Run() {
    for (;;) {
      const std::function<void()> work = Take();
      if (!work) return;
      work();
      const absl::MutexLock lock(&mu_);
      busy_ = false;
    }
  }
  std::function<void()> Take() {
    const auto filled = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !queue_.empty(); };
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&filled));
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    return work;
  }
  bool idle() {
    const absl::MutexLock lock(&mu_);
    return queue_.empty() && !busy_;
  }

  absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_TESTS_HOST_DEVICE_HOST_STREAM_H_
