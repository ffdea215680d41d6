#include "transport/mesh/callers.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace thinwire {
namespace {

using std::chrono::milliseconds;

// Between attempts with a peer that has closed the connection.
constexpr milliseconds kFirstPause{2}, kLongestPause{100};

}  // namespace

Callers::Callers(const Identity& self, const std::vector<Address>& addresses)
    : self_(self), addresses_(addresses), calls_(self.rank) {
  for (Call& call : calls_) {
    call.next_try = Clock::now();
    call.pause = kFirstPause;
  }
}

void Callers::AddAwaited(std::vector<pollfd>& polled) const {
  for (const Call& call : calls_) {
    if (call.attempt.has_value()) polled.push_back(call.attempt->awaited());
  }
}

Deadline Callers::next_try() const {
  Deadline first = Deadline::max();
  for (const Call& call : calls_) {
    if (!call.done && !call.attempt.has_value()) first = std::min(first, call.next_try);
  }
  return first;
}

absl::Status Callers::Advance(std::span<const pollfd>& polled, std::vector<Descriptor>& connected) {
  for (int peer = 0; peer < self_.rank; ++peer) {
    Call& call = calls_[peer];
    if (call.attempt.has_value()) {
      const bool ready = polled.front().revents != 0;
      polled = polled.subspan(1);
      if (!ready) continue;
      if (absl::Status status = Advance(peer, connected); !status.ok()) return status;
    } else if (!call.done && Clock::now() >= call.next_try) {
      Begin(peer);
    }
  }
  return absl::OkStatus();
}

absl::Status Callers::Advance(int peer, std::vector<Descriptor>& connected) {
  Call& call = calls_[peer];
  const absl::Status status = call.attempt->Advance();
  if (absl::IsFailedPrecondition(status)) return status;
  if (!status.ok()) {
    call.refused = absl::IsNotFound(status);
    TryLater(call, status);
  } else if (call.attempt->done()) {
    connected[peer] = call.attempt->Take();
    call.attempt.reset();
    call.done = true;
  }
  return absl::OkStatus();
}

void Callers::Begin(int peer) {
  Call& call = calls_[peer];
  const Address& address = addresses_[peer];
  Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid() || (connect(socket.fd(), address.get(), address.length) != 0 &&
                          errno != EINPROGRESS && errno != EINTR)) {
    call.refused = errno == ECONNREFUSED;
    TryLater(call, absl::UnavailableError(std::strerror(errno)));
    return;
  }
  call.attempt.emplace(std::move(socket), Challenge::AsClient(self_, peer));
}

void Callers::TryLater(Call& call, const absl::Status& why) {
  call.attempt.reset();
  call.trouble = std::string(why.message());
  call.next_try = Clock::now() + call.pause;
  call.pause = std::min(call.pause * 2, kLongestPause);
}

}  // namespace thinwire
