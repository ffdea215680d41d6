#include "transport/mesh/listener.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// Failures of accept(2) that are about the connection, which is gone then, and not about us.
bool IsOfTheConnection(int error) {
  switch (error) {
    case EAGAIN:
    case EBADF:
    case EINVAL:
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM: return false;
    default: return true;
  }
}

}  // namespace

absl::StatusOr<Listener> Listener::Open(const Address& address) {
  Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  Address bound;
  bound.length = sizeof(bound.storage);
  if (!socket.valid() || bind(socket.fd(), address.get(), address.length) != 0 ||
      getsockname(socket.fd(), bound.get(), &bound.length) != 0 ||
      listen(socket.fd(), SOMAXCONN) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on a local address: ", std::strerror(errno)));
  }
  return Listener(std::move(socket), bound);
}

absl::StatusOr<Descriptor> Listener::Accept() {
  for (;;) {
    Descriptor socket(accept4(socket_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid() || errno == EAGAIN) return socket;
    if (!IsOfTheConnection(errno)) return absl::ResourceExhaustedError(std::strerror(errno));
  }
}

}  // namespace thinwire
