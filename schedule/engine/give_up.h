// GiveUp: how a rank leaves a group that fails while it is set up, before there is an engine.
#ifndef THINWIRE_SCHEDULE_ENGINE_GIVE_UP_H_
#define THINWIRE_SCHEDULE_ENGINE_GIVE_UP_H_

#include "absl/status/status.h"
#include "transport/transport.h"

namespace thinwire {

// Tells the reason to all peers, also to those that have an engine already, and leaves the group:
// the transport is empty then. Returns the reason. That is a peer's, if one gave up before and told
// it, since of that this rank itself has only noticed a closed connection.
absl::Status GiveUp(Transport& transport, absl::Status reason);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_GIVE_UP_H_
