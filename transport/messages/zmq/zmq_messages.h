// The messages of a store over TCP, by ZeroMQ with CURVE: every frame is encrypted and
// authenticated, and only who has the group's key becomes a member.
#ifndef THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_MESSAGES_H_
#define THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_MESSAGES_H_

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/mesh/group_key.h"
#include "transport/messages/message_plane.h"

namespace thinwire {

struct ZmqOptions {
  int rank = 0;
  // The secret of the store, from which the keys of CURVE are derived (transport/mesh/group_key.h).
  GroupKey key{"", ""};
  MessageLimits limits;

  // Members that are called listen: servers. The address is that of the named interface, else the
  // one from which packets to `rendezvous_host` leave, else loopback (LocalAddress in
  // transport/mesh/tcp.h). A server that is to be found again after a restart names its port; 0 is
  // any free one.
  bool listens = false;
  std::string interface, rendezvous_host;
  int port = 0;

  // The members to call, by rank: "10.0.0.5:7000" or "[fe80::1]:7000", numeric. Of two members at
  // most one calls the other.
  std::map<int, std::string> calls;

  std::string library;  // path of libzmq; empty: LoadZmq's order (zmq_library.h)
};

class ZmqMessagePlane : public MessagePlane {
 public:
  // Where this member is called; empty if it does not listen.
  virtual const std::string& address() const = 0;

  // Calls a member, again and again until it answers, and again whenever it is lost. A new address
  // replaces the former one, whose connection is lost then. InvalidArgument if it is not numeric.
  virtual absl::Status Call(int peer, const std::string& address) = 0;
};

// Raises the process's soft limit of descriptors to the hard one (to 2^20 at most) if it listens,
// since every stranger that connects takes one until its handshake fails. Returns at once: peers
// come as events. Unimplemented without a usable libzmq; InvalidArgument for an address or an
// interface that can't be; Unavailable if the port is taken.
absl::StatusOr<std::unique_ptr<ZmqMessagePlane>> StartZmqMessages(const ZmqOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_MESSAGES_H_
