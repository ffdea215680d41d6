#include "transport/mesh/half_open.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace thinwire {
namespace {

bool IsNotYet(int error) { return error == EAGAIN || error == EINTR; }

absl::Status Broken(int error) {
  if (error == ECONNREFUSED) return absl::NotFoundError(std::strerror(error));
  return absl::UnavailableError(std::strerror(error));
}

}  // namespace

absl::Status HalfOpen::Advance() {
  for (;;) {
    if (absl::Status broken = Send(); !broken.ok()) return broken;
    if (!to_send_.empty() || done()) return absl::OkStatus();
    if (absl::Status broken = Receive(); !broken.ok()) return broken;
    if (received_.size() < challenge_.awaited()) return absl::OkStatus();
    absl::Status taken = challenge_.Take(std::exchange(received_, {}), &to_send_);
    if (!taken.ok()) {
      Send().IgnoreError();  // the answer to a rank that is set up in another way
      return taken;
    }
  }
}

// While the socket is connecting, send says that it would block; then, why connecting failed.
absl::Status HalfOpen::Send() {
  while (!to_send_.empty()) {
    const ssize_t sent = send(socket_.fd(), to_send_.data(), to_send_.size(), MSG_NOSIGNAL);
    if (sent < 0) return IsNotYet(errno) ? absl::OkStatus() : Broken(errno);
    to_send_.erase(0, static_cast<size_t>(sent));
  }
  return absl::OkStatus();
}

absl::Status HalfOpen::Receive() {
  const size_t had = received_.size();
  received_.resize(challenge_.awaited());
  const ssize_t got = recv(socket_.fd(), received_.data() + had, received_.size() - had, 0);
  const int error = errno;
  received_.resize(had + (got > 0 ? static_cast<size_t>(got) : 0));
  if (got == 0) return absl::UnavailableError("it closed the connection");
  if (got < 0 && !IsNotYet(error)) return Broken(error);
  return absl::OkStatus();
}

}  // namespace thinwire
