// Listener: the one socket on which a rank is reached while its group connects.
#ifndef THINWIRE_TRANSPORT_MESH_LISTENER_H_
#define THINWIRE_TRANSPORT_MESH_LISTENER_H_

#include "absl/status/statusor.h"
#include "transport/mesh/address.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

// Not thread-safe.
class Listener {
 public:
  // Listens on a free port of the address.
  static absl::StatusOr<Listener> Open(const Address& address);

  // The next connection, which never blocks. None is waiting, if it is not valid; ResourceExhausted
  // if this process has no descriptor left for it.
  absl::StatusOr<Descriptor> Accept();

  const Address& address() const { return address_; }  // with the port
  int fd() const { return socket_.fd(); }

 private:
  Listener(Descriptor socket, Address address) : socket_(std::move(socket)), address_(address) {}

  Descriptor socket_;
  Address address_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_LISTENER_H_
