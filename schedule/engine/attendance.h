// Attendance: who is awake when a deadline that all ranks share has passed, while there is no
// engine yet that would answer its peers.
#ifndef THINWIRE_SCHEDULE_ENGINE_ATTENDANCE_H_
#define THINWIRE_SCHEDULE_ENGINE_ATTENDANCE_H_

#include <chrono>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/control_plane.h"

namespace thinwire {

// Ranks that wait for one another in a ring can't tell which of them holds up all others. So each
// calls this at the end of its wait, with a plane that has failed, and tells its peers that it is
// here. The ranks, in order, from which nothing has come within `patience`; or the failure that one
// of them told in place of that.
absl::StatusOr<std::vector<int>> SilentRanks(ControlPlane& control,
                                             std::chrono::milliseconds patience);

// What such a rank returns: DeadlineExceeded, which says `what` it could not do, such as "could not
// measure its links in time", and names the silent ranks, who have a 30th of `timeout` to speak; or
// the failure that one told.
absl::Status LateError(ControlPlane& control, std::string_view what,
                       std::chrono::milliseconds timeout);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_ATTENDANCE_H_
