// MessagePlane: messages of any size between the members of a store, which come and go. The planes
// of planes.h are for groups whose members are fixed and whose exchanges match; here a worker sends
// to servers, and servers answer.
//
// Peers are ranks of the store's roster, which numbers workers and servers together. Some members
// listen (servers), and members call the peers whose addresses they are given: workers are
// connected to servers, not to one another. One contract holds for every backend;
// tests/transport/messages_test.cc states it.
//
// Flow control. Every connection has a credit of bytes in each direction. The plane hands the
// transport at most `credit` bytes that the peer has not taken by Receive, and no more than the
// link needs (SendWindow in queues.h); all other messages wait in the sender's queue, where a
// message of higher priority overtakes them (P3, Jayarajan et al., MLSys 2019, section 4.2). So a
// member with n peers holds at most n * credit bytes that its owner has not taken, however fast
// they send. A message that is larger than the credit is sent alone, once everything before it was
// taken.
//
// Messages that were not taken may be lost. A message arrives once and whole, or its peer becomes
// kLost. A member that loses a peer does not know which of the messages after the last answer were
// taken: callers number their requests, and repeat them after kJoined.
#ifndef THINWIRE_TRANSPORT_MESSAGES_MESSAGE_PLANE_H_
#define THINWIRE_TRANSPORT_MESSAGES_MESSAGE_PLANE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/store.h"

namespace thinwire {

// A message as it was received.
struct Message {
  int peer = 0;               // the sender's rank in the roster
  int priority = 0;           // as the sender set it
  std::string head;           // a small header, which the caller defines
  std::vector<uint8_t> body;  // may be empty
};

// A peer came or went. The first event of a connection is kJoined and the last one kLost; a peer
// that returns is kJoined again, with nothing left from its earlier connection. A peer that refuses
// this member is kLost, perhaps without having joined.
struct PeerEvent {
  enum class Kind { kJoined, kLost };

  Kind kind = Kind::kJoined;
  int peer = 0;
  // OK with kJoined. With kLost: Unavailable when its connection ended, Cancelled when it closed
  // its plane, DeadlineExceeded when nothing arrived from it for the plane's timeout, DataLoss when
  // a message between the two is missing or exceeds their limits, FailedPrecondition when the
  // settings of the two differ or another member has come with this one's rank; such a peer is not
  // called again.
  absl::Status reason;
};

using MessageEvent = std::variant<Message, PeerEvent>;

// The same on all members.
struct MessageLimits {
  // Bytes in each direction of each connection that were sent and not yet taken. A message counts
  // as its head, its body and kMessageCost.
  size_t credit = size_t{2} << 20;
  // The largest sum of head and body, in bytes. Send refuses larger messages, and so does the
  // receiver.
  size_t max_message = size_t{1} << 30;
  // A peer from which nothing has arrived for this time is lost. Planes send keep-alives by
  // themselves, on a thread of their own.
  std::chrono::milliseconds timeout{10000};
};

inline constexpr size_t kMessageCost = 64;

// Send, bytes_sent and Close may be called from any thread, Receive from one at a time. The
// destructor closes the plane without waiting; no call may be in progress then. No call throws, and
// none ends the process.
class MessagePlane {
 public:
  virtual ~MessagePlane() = default;

  virtual int rank() const = 0;

  // Queues a message for a peer that has joined. Never waits and never drops: messages leave by
  // priority, the higher first, and those of equal priority in the order in which they were sent,
  // as far as the credit allows. Unavailable if the peer has not joined or is lost (queued messages
  // that it has not taken are then dropped), until Receive has returned its last event: so nothing
  // is sent on a new connection before the owner knows that the old one was lost. InvalidArgument
  // above max_message; Cancelled after Close.
  virtual absl::Status Send(int peer, int priority, std::string head,
                            std::vector<uint8_t> body) = 0;

  // Returns the next event, else the next message: the oldest one of the highest priority. Taking a
  // message returns its bytes to the sender's credit. When a peer is lost, the messages from it
  // that were not taken are dropped, and the event comes at once. DeadlineExceeded at the deadline
  // names the peers that were called and are not connected, and why; Cancelled after Close.
  virtual absl::StatusOr<MessageEvent> Receive(Deadline deadline) = 0;

  // Bytes of the heads and bodies that were handed to the transport so far.
  virtual uint64_t bytes_sent() const = 0;

  // Leaves the store: waits until the peers have taken what was sent to them or are lost, at most
  // until `deadline`, and then says goodbye to them; they lose this member with Cancelled. From
  // then on Receive returns Cancelled. DeadlineExceeded names the peers that have not taken
  // everything. A second call does nothing.
  virtual absl::Status Close(Deadline deadline) = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_MESSAGE_PLANE_H_
