// Points in the work of a stream, on top of a DeviceApi: reusable events, and a call on which a
// host thread sleeps.
#ifndef THINWIRE_KERNELS_DEVICE_EVENTS_H_
#define THINWIRE_KERNELS_DEVICE_EVENTS_H_

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "compress/device.h"
#include "kernels/device_api.h"

namespace thinwire::kernels {

// Events are created once and reused.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(const DeviceApi& api, int ordinal) : api_(api), ordinal_(ordinal) {}
  ~EventPool() {
    for (void* event : free_) api_.destroy_event(ordinal_, event);
  }

  class Event final : public DeviceEvent {
   public:
    Event(std::shared_ptr<EventPool> pool, void* handle) : pool_(std::move(pool)), handle(handle) {}
    ~Event() override { pool_->Return(handle); }

   private:
    const std::shared_ptr<EventPool> pool_;

   public:
    void* const handle;
  };

  void Return(void* event) {
    const absl::MutexLock lock(&mu_);
    free_.push_back(event);
  }

  // Returns the error number, or 0.
  int Take(std::shared_ptr<Event>* event) {
    void* handle = nullptr;
    {
      const absl::MutexLock lock(&mu_);
      if (!free_.empty()) {
        handle = free_.back();
        free_.pop_back();
      }
    }
    if (handle == nullptr) {
      if (const int error = api_.make_event(ordinal_, &handle); error != 0) return error;
    }
    *event = std::make_shared<Event>(shared_from_this(), handle);
    return 0;
  }

 private:
  const DeviceApi& api_;
  const int ordinal_;
  absl::Mutex mu_;
  std::vector<void*> free_ ABSL_GUARDED_BY(mu_);
};

// Signals one waiting host thread that a stream has reached a point. Both share ownership, since
// the thread may give up earlier.
class Arrival : public std::enable_shared_from_this<Arrival> {
 public:
  // Queues the signal on the stream; returns the error number, or 0. If the device fails before,
  // the signal's share is leaked.
  int Expect(const DeviceApi& api, int ordinal, void* stream) {
    auto* const share = new std::shared_ptr<Arrival>(shared_from_this());
    const int error = api.call(ordinal, Call, share, stream);
    if (error != 0) delete share;
    return error;
  }
  bool AwaitUntil(std::chrono::steady_clock::time_point when) {
    const absl::Duration left = absl::FromChrono(when - std::chrono::steady_clock::now());
    const absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&here_), left);
  }

 private:
  static void Call(void* argument) {
    const std::unique_ptr<std::shared_ptr<Arrival>> share(
        static_cast<std::shared_ptr<Arrival>*>(argument));
    const absl::MutexLock lock(&(*share)->mu_);
    (*share)->here_ = true;
  }

  absl::Mutex mu_;
  bool here_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_DEVICE_EVENTS_H_
