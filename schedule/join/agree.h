// How ranks that are connected agree while their group comes together: every rank tells all others
// something, and decides by a function of what all have told. A peer that dies meanwhile is noticed
// at once, since its connections close.
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
  std::string subject;  // what is agreed on, such as "UCX"
  Membership members;   // those who agree, numbered among themselves
  // Connects them, and others perhaps, and must outlive this. Its planes are of one backend, match
  // by tag and are of host memory.
  Transport& transport;
  int first = 0;                      // the transport's rank of the members' rank 0
  Deadline deadline;                  // of all of them, if they have asked for EarliestDeadline
  std::chrono::milliseconds timeout;  // of the group, as its user set it
};

// The most bytes of an answer. A longer one counts as a failure; a failure is cut to it.
inline constexpr size_t kMostAnswerBytes = 4080;

// Every rank gives its answer, any bytes or a failure, and gets everybody's, the same on all ranks.
// A topic is used once by the same members. Unavailable names a rank that is gone, and
// DeadlineExceeded those that FindSilentRanks finds; either is the transport's failure as well.
absl::StatusOr<Answers> TellAll(const Board& board, std::string_view topic,
                                const absl::StatusOr<std::string>& mine);

// The first of all ranks' deadlines, which may differ by as much as the ranks began one after the
// other: so they all give up at the same moment, but for the time that a message takes. Fails as
// TellAll.
absl::StatusOr<Deadline> EarliestDeadline(const Board& board);

// TellAll for a data plane that connects by itself.
TellAddress TellerOf(const Board& board);

// OK, or Unimplemented for the first rank that answered with a failure.
absl::Status FirstRefusal(const Board& board, const Answers& answers);

// True if a peer may still listen: not once the group has failed, or its time is over.
bool CanTell(const Board& board);

// Every rank tells what has come of its own try. OK if all have succeeded; Unimplemented names the
// first that has not. A failure that can't be told any more is returned as it is, since silence is
// no fault of the others then; who gives up passes it on.
absl::Status TellOutcome(const Board& board, std::string_view topic, const absl::Status& mine);

// Last words: how the ranks of a group that fails while it comes together tell one another why.
// There is no engine yet that would receive frames and answer peers.

// Fails `control` and tells `reason` to all peers, also to those that have an engine already. The
// frames have left when this returns, as far as peers take them within a moment. Returns the
// reason, or that of a peer which gave up first and told it: this rank has then noticed no more
// than a closed connection.
absl::Status TellWhy(ControlPlane& control, absl::Status reason);

// Leaves the group: TellWhy, and empties the transport.
absl::Status GiveUp(Transport& transport, absl::Status reason);

// DeadlineExceeded, for a rank that could not do `what` in time, such as "measure its links": it
// waited for others, which may themselves wait for the one that holds up all. All ranks of the
// transport call it when the deadline that they share has passed and their control planes have
// failed; each tells its peers that it is awake. The silent ones are those that are not in
// `heard_from` (by the transport's ranks), and of which nothing arrives within a 30th of the
// board's timeout, at most 250 ms; if there are none the network is at fault. Returns a peer's
// failure if one told it instead.
absl::Status FindSilentRanks(const Board& board, const std::string& what,
                             std::vector<bool> heard_from = {});

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_JOIN_AGREE_H_
