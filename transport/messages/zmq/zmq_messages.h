// A store's messages over TCP, by ZeroMQ with CURVE: every frame is encrypted and authenticated,
// and only holders of the group's key become members.
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

  // Members that others call (servers) listen. The address is that of the named interface, else the
  // one from which packets to `rendezvous_host` leave, else loopback (LocalAddress in
  // transport/mesh/tcp.h). A server that must be reachable again after a restart needs a fixed
  // port; 0 is any free one.
  bool listens = false;
  std::string interface, rendezvous_host;
  int port = 0;

  // The members to call, by rank: "10.0.0.5:7000" or "[fe80::1]:7000", numeric. In each pair of
  // members at most one calls the other.
  std::map<int, std::string> calls;

  std::string library;  // path of libzmq; empty: the search order of LoadZmq (zmq_library.h)
};

class ZmqMessagePlane : public MessagePlane {
 public:
  // The address at which this member can be called; empty if it does not listen.
  virtual const std::string& address() const = 0;

  // Calls a member until it answers, and again whenever it is lost. A new address replaces the
  // former one, whose connection is then lost. InvalidArgument if it is not numeric.
  virtual absl::Status Call(int peer, const std::string& address) = 0;
};

// If this member listens, raises the process's soft limit of descriptors to the hard one (to 2^20
// at most), since every stranger that connects uses one until its handshake fails. Returns at once:
// peers arrive as events. Unimplemented without a usable libzmq; InvalidArgument for an unusable
// address or interface; Unavailable if the port is in use.
absl::StatusOr<std::unique_ptr<ZmqMessagePlane>> StartZmqMessages(const ZmqOptions& options);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_ZMQ_ZMQ_MESSAGES_H_
