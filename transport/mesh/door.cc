#include "transport/mesh/door.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kMostGuests = 128;
constexpr int kAcceptedInATurn = 64;  // so that those that are half open get their turn
constexpr std::chrono::seconds kPatience{5};

}  // namespace

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
