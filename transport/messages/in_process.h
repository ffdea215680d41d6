// A store's members as threads of one process: the reference for MessagePlane, and what tests of
// the store run on.
#ifndef THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_
#define THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_

#include <memory>
#include <vector>

#include "transport/messages/message_plane.h"

namespace thinwire {

class MessageHub;

// The hub that the members share.
std::shared_ptr<MessageHub> MakeMessageHub(const MessageLimits& limits);

// Member `rank`, which is connected at once with the members of `calls` that are there, and with
// the others when they come; and with those that call it. A member that comes while another of its
// rank is there takes its place: peers lose the old one with Unavailable, and it loses all of them
// with FailedPrecondition. From any thread. Dropping the plane without Close is how a test kills a
// member: its peers lose it with Unavailable.
std::unique_ptr<MessagePlane> JoinMessageHub(std::shared_ptr<MessageHub> hub, int rank,
                                             std::vector<int> calls);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_
