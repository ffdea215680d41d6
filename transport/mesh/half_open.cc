#include "transport/mesh/half_open.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;

bool IsNotYet(int error) { return error == EAGAIN || error == EINTR; }

absl::Status Broken(int error) {
  if (error == ECONNREFUSED) return absl::NotFoundError(std::strerror(error));
  return absl::UnavailableError(std::strerror(error));
}

// Between attempts with a peer that has closed the connection.
constexpr milliseconds kFirstPause{2}, kLongestPause{100};

constexpr size_t kMostGuests = 128;
constexpr int kAcceptedInATurn = 64;  // so that half-open connections get their turn
constexpr std::chrono::seconds kPatience{5};

}  // namespace

absl::Status HalfOpen::Advance() {
  for (;;) {
    if (absl::Status broken = Send(); !broken.ok()) return broken;
    if (!to_send_.empty() || done()) return absl::OkStatus();
    if (absl::Status broken = Receive(); !broken.ok()) return broken;
    if (received_.size() < challenge_.awaited()) return absl::OkStatus();
    absl::Status taken = challenge_.Take(std::exchange(received_, {}), &to_send_);
    if (!taken.ok()) {
      Send().IgnoreError();  // the answer to a rank whose settings differ
      return taken;
    }
  }
}

// While the socket is connecting, send would block; afterwards it returns why connecting failed.
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

// Callers.

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

// Door.

void Door::AddAwaited(std::vector<pollfd>& polled) const {
  polled.push_back({listener_.fd(), POLLIN, 0});
  for (const Guest& guest : guests_) polled.push_back(guest.connection.awaited());
}

Deadline Door::next_expiry() const {
  return guests_.empty() ? Deadline::max() : guests_.front().until;
}

absl::Status Door::Advance(std::span<const pollfd>& polled, std::vector<Descriptor>& connected) {
  const bool somebody_waits = polled.front().revents != 0;
  const std::span<const pollfd> guests = polled.subspan(1, guests_.size());
  polled = polled.subspan(1 + guests.size());
  if (absl::Status status = AdvanceGuests(guests, connected); !status.ok()) return status;
  return somebody_waits ? Admit() : absl::OkStatus();
}

absl::Status Door::AdvanceGuests(std::span<const pollfd> polled,
                                 std::vector<Descriptor>& connected) {
  const Deadline now = Clock::now();
  auto guest = guests_.begin();
  for (const pollfd& event : polled) {
    HalfOpen& connection = guest->connection;
    const absl::Status status = event.revents != 0 ? connection.Advance() : absl::OkStatus();
    if (absl::IsFailedPrecondition(status)) return status;
    if (status.ok() && !connection.done() && now < guest->until) {
      ++guest;
      continue;
    }
    if (status.ok() && connection.done()) {
      connected[connection.peer()] = connection.Take();
    } else {
      ++turned_away_;
    }
    guest = guests_.erase(guest);
  }
  return absl::OkStatus();
}

absl::Status Door::Admit() {
  for (int i = 0; i < kAcceptedInATurn; ++i) {
    absl::StatusOr<Descriptor> socket = listener_.Accept();
    if (!socket.ok()) return MakeRoom();  // and accept again in the next turn
    if (!socket->valid()) break;
    if (guests_.size() == kMostGuests) MakeRoom().IgnoreError();
    guests_.push_back(
        {HalfOpen(*std::move(socket), Challenge::AsServer(self_)), Clock::now() + kPatience});
  }
  return absl::OkStatus();
}

absl::Status Door::MakeRoom() {
  if (guests_.empty()) {
    return absl::UnavailableError(
        absl::StrCat("rank ", self_.rank,
                     " can accept no connection, since this process has no "
                     "descriptor left; raise its limit (ulimit -n)"));
  }
  auto oldest = std::find_if(guests_.begin(), guests_.end(),
                             [](const Guest& guest) { return guest.connection.peer() < 0; });
  guests_.erase(oldest == guests_.end() ? guests_.begin() : oldest);
  ++turned_away_;
  return absl::OkStatus();
}

}  // namespace thinwire
