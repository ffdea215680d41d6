// Last words: how the ranks of a group that fails while it comes together tell one another why.
// There is no engine yet that would receive frames and answer peers.
#ifndef THINWIRE_SCHEDULE_JOIN_LAST_WORDS_H_
#define THINWIRE_SCHEDULE_JOIN_LAST_WORDS_H_

#include <chrono>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "transport/planes.h"

namespace thinwire {

// Fails `control` and tells `reason` to all peers, also to those that have an engine already. The
// frames have left when this returns, as far as peers take them within a moment. Returns the
// reason, or that of a peer which gave up first and told it: this rank has then noticed no more
// than a closed connection.
absl::Status TellWhy(ControlPlane& control, absl::Status reason);

// Leaves the group: TellWhy, and empties the transport.
absl::Status GiveUp(Transport& transport, absl::Status reason);

// DeadlineExceeded: `rank` could not do `what` in time, such as "measure its links", because the
// ranks in `silent`, in order, did not answer. If there are none the network is at fault.
absl::Status LateError(int rank, const std::string& what, std::span<const int> silent);

// The LateError of a rank that waited in a ring of ranks, where nobody can tell which one holds up
// all others. All ranks call it when the deadline that they share has passed and `control` has
// failed; each tells its peers that it is awake. Ranks of which nothing arrives within a 30th of
// `timeout`, at most 250 ms, are the silent ones. Returns a peer's failure if one told it instead.
absl::Status FindSilentRanks(ControlPlane& control, const std::string& what,
                             std::chrono::milliseconds timeout);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_LAST_WORDS_H_
