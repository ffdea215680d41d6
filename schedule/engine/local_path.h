// LocalPath: the collectives of a world of one, on the caller's thread, and on a device on the
// caller's own stream.
#ifndef THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_
#define THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "schedule/engine/in_flight.h"

namespace thinwire {

// Thread-safe.
class LocalPath {
 public:
  // The reference outlives it.
  explicit LocalPath(const Options& options) : options_(options) {}

  // Runs all of the work. A failure is the device's.
  absl::Status Run(const InFlight& work);

 private:
  std::unique_ptr<Scratch> TakeScratch(Device* device);
  absl::Status RunOn(const InFlight& work, const Backend& backend, Scratch& scratch) const;

  const Options& options_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Scratch>> spare_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_
