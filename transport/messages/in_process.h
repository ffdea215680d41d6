// A store's members as threads of one process: the reference for MessagePlane, which tests of the
// store use.
#ifndef THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_
#define THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_

#include <memory>
#include <vector>

#include "transport/messages/message_plane.h"

namespace thinwire {

class MessageHub;

// The hub that the members share.
std::shared_ptr<MessageHub> MakeMessageHub(const MessageLimits& limits);

// Adds member `rank`. It is connected at once with the members of `calls` that have joined, with
// the others when they join, and with those that call it. If a member of the same rank has already
// joined, the new one replaces it: peers lose the old one with Unavailable, and it loses all of
// them with FailedPrecondition. Any thread may call it. Tests kill a member by dropping its plane
// without Close: its peers lose it with Unavailable.
std::unique_ptr<MessagePlane> JoinMessageHub(std::shared_ptr<MessageHub> hub, int rank,
                                             std::vector<int> calls);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_IN_PROCESS_H_
