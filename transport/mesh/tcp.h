// TCP for the mesh: addresses, the socket that listens, and the choice of the kernel's congestion
// control for a connection.
#ifndef THINWIRE_TRANSPORT_MESH_TCP_H_
#define THINWIRE_TRANSPORT_MESH_TCP_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

// A numeric IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }

  std::string Host() const;
  int Port() const;

  // InvalidArgument if the host is not numeric.
  static absl::StatusOr<Address> Of(const std::string& host, int port);
};

// Returns, with port 0, the address of the named interface, else the one from which packets to
// `rendezvous_host` leave, else loopback. Never a wildcard. InvalidArgument, which lists the
// machine's interfaces, for an interface that does not exist or has no address.
absl::StatusOr<Address> LocalAddress(const std::string& interface,
                                     const std::string& rendezvous_host);

// The socket on which a rank accepts connections while its group connects. Not thread-safe.
class Listener {
 public:
  // Listens on a free port of the address.
  static absl::StatusOr<Listener> Open(const Address& address);

  // Returns the next connection, non-blocking. If it is not valid, none is waiting;
  // ResourceExhausted if this process has no descriptor left for it.
  absl::StatusOr<Descriptor> Accept();

  const Address& address() const { return address_; }  // with the port
  int fd() const { return socket_.fd(); }

 private:
  Listener(Descriptor socket, Address address) : socket_(std::move(socket)), address_(address) {}

  Descriptor socket_;
  Address address_;
};

// `congestion` below is one of the kernel's names, such as "cubic"; "system" or empty means the
// kernel's default. docs/decisions.md, 35 explains why it is not chosen automatically.

// InvalidArgument, which lists the allowed ones, if this process may not use `congestion`.
absl::Status CheckCongestion(const std::string& congestion);

// Sets the congestion control of a TCP socket. The name has been checked.
void ChooseCongestion(int socket, const std::string& congestion);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_TCP_H_
