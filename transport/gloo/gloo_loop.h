// GlooLoop: work for the thread of Gloo's event loop.
//
// That loop only tries the lock of the connection that an event is about. While a caller holds it,
// in a send or receive of its own, the loop skips the event, is handed it again at once, and so
// spins for as long as the caller's system call takes: up to 40 % of a core. So nobody else calls
// send or recv: what is started on the loop's thread can't meet the loop.
#ifndef THINWIRE_TRANSPORT_GLOO_GLOO_LOOP_H_
#define THINWIRE_TRANSPORT_GLOO_GLOO_LOOP_H_

#include <gloo/transport/tcp/device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {

// Thread-safe.
class GlooLoop final : private gloo::transport::tcp::Handler {
 public:
  // Throws what Gloo does, if no descriptor is left.
  explicit GlooLoop(std::shared_ptr<gloo::transport::tcp::Device> device);
  ~GlooLoop() override;
  GlooLoop(const GlooLoop&) = delete;
  GlooLoop& operator=(const GlooLoop&) = delete;

  // Runs `task` once on the loop's thread, after those that were posted before. It must neither
  // block nor throw, and what it touches must live until it has run: see Sync. One that captures a
  // single pointer takes no memory of its own.
  void Post(std::function<void()> task);

  // Returns when all that was posted before has run. Not on the loop's thread.
  void Sync();

 private:
  void handleEvents(int events) override;

  const std::shared_ptr<gloo::transport::tcp::Device> device_;
  const int wakeup_;                            // an eventfd that the loop watches
  std::vector<std::function<void()>> running_;  // the loop's thread's own
  absl::Mutex mu_;
  absl::CondVar ran_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t ran_count_ ABSL_GUARDED_BY(mu_) = 0;
  int syncing_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_GLOO_LOOP_H_
