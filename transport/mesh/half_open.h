// HalfOpen: a connection whose two ends are still proving to each other who they are.
#ifndef THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_
#define THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_

#include <poll.h>

#include <string>

#include "absl/status/status.h"
#include "transport/mesh/challenge.h"
#include "transport/mesh/descriptor.h"

namespace thinwire {

// A socket that never blocks, which may still be connecting, with its challenge. It reads no byte
// beyond the challenge. Movable, not thread-safe.
class HalfOpen {
 public:
  HalfOpen(Descriptor socket, Challenge challenge)
      : socket_(std::move(socket)),
        challenge_(std::move(challenge)),
        to_send_(challenge_.hello()) {}

  // Sends and takes what is possible now. After an error the connection is to be dropped: those of
  // Challenge::Take, Unavailable if the connection broke, NotFound if it was refused.
  absl::Status Advance();

  bool done() const { return to_send_.empty() && challenge_.awaited() == 0; }
  int peer() const { return challenge_.peer(); }
  pollfd awaited() const {
    return {socket_.fd(), to_send_.empty() ? short{POLLIN} : short{POLLOUT}, 0};
  }
  Descriptor Take() { return std::move(socket_); }

 private:
  absl::Status Send();     // as much as the socket takes
  absl::Status Receive();  // as much as there is of the message awaited

  Descriptor socket_;
  Challenge challenge_;
  std::string to_send_;
  std::string received_;  // of the message awaited
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_HALF_OPEN_H_
