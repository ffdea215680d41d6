// ToldReason: why a group has failed, in the words of the peer that gave up first.
#ifndef THINWIRE_SCHEDULE_ENGINE_TOLD_H_
#define THINWIRE_SCHEDULE_ENGINE_TOLD_H_

#include <vector>

#include "absl/status/status.h"
#include "transport/control_plane.h"

namespace thinwire {

// Takes the frames that have come, up to the first failure among them, and returns that; OK if none
// tells of one. The plane has failed, so this does not wait, and nobody else receives.
// heard_from: by rank, set for each from which a frame was taken; null: nobody asks.
absl::Status ToldReason(ControlPlane& control, std::vector<bool>* heard_from = nullptr);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_TOLD_H_
