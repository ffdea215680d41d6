// How connected ranks agree while their group comes together: every rank sends an answer to all
// others, and decides by a function of all answers. A peer that dies meanwhile is noticed at once,
// since its connections close.
#ifndef THINWIRE_SCHEDULE_JOIN_AGREE_H_
#define THINWIRE_SCHEDULE_JOIN_AGREE_H_

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

using Answers = std::vector<absl::StatusOr<std::string>>;  // by rank

// The members that agree on a subject, their connections, and their deadline.
struct Board {
  std::string subject;  // what the members agree on, such as "UCX"
  Membership members;   // the ranks that agree, numbered from 0
  // Connects the members, and maybe other ranks; must outlive the board. Its planes are of one
  // backend, match by tag and move host memory.
  Transport& transport;
  int first = 0;                      // the transport's rank of the members' rank 0
  Deadline deadline;                  // this rank's, or all members' after EarliestDeadline
  std::chrono::milliseconds timeout;  // the group's, as the user set it
};

// The most bytes of an answer. A longer one counts as a failure; a failure is cut to it.
inline constexpr size_t kMostAnswerBytes = 4080;

// Every rank gives an answer (any bytes, or a failure), and gets all ranks' answers, the same on
// all ranks. The same members must not use a topic twice. Unavailable names a rank that is gone,
// DeadlineExceeded the ranks that FindSilentRanks finds; either also fails the transport.
absl::StatusOr<Answers> TellAll(const Board& board, std::string_view topic,
                                const absl::StatusOr<std::string>& mine);

// Returns the earliest of all ranks' deadlines, which differ because ranks start at different
// times: so all give up at the same moment, apart from the time that a message takes. Fails like
// TellAll.
absl::StatusOr<Deadline> EarliestDeadline(const Board& board);

// TellAll as a function for a data plane that connects by itself.
TellAddress TellerOf(const Board& board);

// OK, or Unimplemented for the first rank that answered with a failure.
absl::Status FirstRefusal(const Board& board, const Answers& answers);

// True if peers may still listen: false once the group has failed or the deadline has passed.
bool CanTell(const Board& board);

// Every rank tells the outcome of its own attempt. OK if all have succeeded; Unimplemented names
// the first rank that has not. If !CanTell, returns this rank's failure unchanged, since the others
// are then not at fault for being silent; TellWhy passes it on.
absl::Status TellOutcome(const Board& board, std::string_view topic, const absl::Status& mine);

// Last words: how ranks tell one another why their group fails while it comes together. There is no
// engine yet that would receive frames and answer peers.

// Fails `control` and sends `reason` to all peers, also to those that have an engine already. Waits
// a moment for the frames to leave. Returns the reason, or that of a peer that gave up first and
// sent its own: this rank then only knows of a closed connection.
absl::Status TellWhy(ControlPlane& control, absl::Status reason);

// Leaves the group: TellWhy, and empties the transport.
absl::Status GiveUp(Transport& transport, absl::Status reason);

// Returns DeadlineExceeded for a rank that could not do `what`, such as "measure its links", in
// time. The ranks that it waited for may themselves wait for another, so this finds the silent
// ones. All ranks of the transport must call it when their common deadline has passed and their
// control planes have failed; each then tells its peers that it is awake. A rank is silent if it is
// not in `heard_from` (by the transport's ranks) and sends nothing within a 30th of the board's
// timeout, at most 250 ms; if no rank is silent, the network is at fault. If a peer has sent its
// failure, returns that instead.
absl::Status FindSilentRanks(const Board& board, const std::string& what,
                             std::vector<bool> heard_from = {});

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_AGREE_H_
