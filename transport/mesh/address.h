// Address: where a rank listens, and how it is written down for the others.
#ifndef THINWIRE_TRANSPORT_MESH_ADDRESS_H_
#define THINWIRE_TRANSPORT_MESH_ADDRESS_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/statusor.h"

namespace thinwire {

// A numeric IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }

  std::string Host() const;
  int Port() const;

  // InvalidArgument if the host is no number.
  static absl::StatusOr<Address> Of(const std::string& host, int port);
};

// With port 0: the address of the named interface, else the one from which packets to
// `rendezvous_host` leave, else loopback. Never a wildcard. InvalidArgument, with the names that
// there are, for an interface that this machine has not, or that has no address.
absl::StatusOr<Address> LocalAddress(const std::string& interface,
                                     const std::string& rendezvous_host);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_ADDRESS_H_
