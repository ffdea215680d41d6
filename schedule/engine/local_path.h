// LocalPath: the collectives of a world of one, on the caller's thread, and on a device on the
// caller's own stream.
#ifndef THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_
#define THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_

#include "schedule/engine/in_flight.h"

namespace thinwire {

// Thread-safe.
class LocalPath {
 public:
  // The references outlive it.
  LocalPath(const Options& options, Workspaces& spaces) : options_(options), spaces_(spaces) {}

  // Runs all of the work. A failure is the device's.
  absl::Status Run(const InFlight& work);

 private:
  absl::Status RunOn(const InFlight& work, DeviceStream* stream) const;

  const Options& options_;
  Workspaces& spaces_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_LOCAL_PATH_H_
