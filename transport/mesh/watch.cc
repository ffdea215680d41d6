#include "transport/mesh/watch.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace thinwire {
namespace {

using std::chrono::milliseconds;

// Most ranks have called before the first line would be of use. A line that its other end has
// closed, as it does with who stays silent, is renewed. So is one that has grown old: of a rank
// that died the word may be lost, since a reset is sent once and a listener's queue dies silently,
// and where nothing is said nothing is asked for again.
constexpr milliseconds kFirstLine{20}, kFirstPause{2}, kLongestPause{200}, kOldAge{1000};

int ErrorOf(int socket) {
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

}  // namespace

Watch::Watch(int rank, const std::vector<Address>& addresses)
    : rank_(rank), addresses_(addresses), peers_(addresses.size()) {
  for (Peer& peer : peers_) {
    peer.next_try = Clock::now() + kFirstLine;
    peer.pause = kFirstPause;
  }
}

void Watch::AddAwaited(const std::vector<Descriptor>& connected, std::vector<pollfd>& polled) {
  polled_.clear();
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
    Peer& peer = peers_[number];
    if (connected[number].valid()) peer.line = Descriptor();
    const Descriptor& watched = connected[number].valid() ? connected[number] : peer.line;
    if (peer.gone || !watched.valid()) continue;
    polled.push_back({watched.fd(), POLLRDHUP, 0});
    polled_.push_back(number);
  }
}

Deadline Watch::next_try() const {
  Deadline first = Deadline::max();
  for (size_t number = rank_ + 1; number < peers_.size(); ++number) {
    const Peer& peer = peers_[number];
    if (!peer.gone) first = std::min(first, peer.next_try);
  }
  return first;
}

void Watch::Advance(std::span<const pollfd>& polled, const std::vector<Descriptor>& connected) {
  for (const int number : polled_) {
    const pollfd event = polled.front();
    polled = polled.subspan(1);
    if (event.revents == 0) continue;
    Peer& peer = peers_[number];
    if (event.fd != peer.line.fd()) {
      peer.gone = true;
    } else if (!connected[number].valid()) {
      OnBroken(peer, ErrorOf(event.fd));
    }
  }
  for (size_t number = rank_ + 1; number < peers_.size(); ++number) {
    Peer& peer = peers_[number];
    if (peer.gone || Clock::now() < peer.next_try) continue;
    if (connected[number].valid()) {
      peer.next_try = Deadline::max();
    } else {
      Begin(peer, addresses_[number]);
    }
  }
}

void Watch::Begin(Peer& peer, const Address& address) {
  peer.next_try = Clock::now() + kOldAge;
  peer.line = Descriptor(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!peer.line.valid() || (connect(peer.line.fd(), address.get(), address.length) != 0 &&
                             errno != EINPROGRESS && errno != EINTR)) {
    OnBroken(peer, errno);
  }
}

void Watch::OnBroken(Peer& peer, int error) {
  peer.gone = error == ECONNREFUSED;
  peer.line = Descriptor();
  peer.next_try = Clock::now() + peer.pause;
  peer.pause = std::min(peer.pause * 2, kLongestPause);
}

}  // namespace thinwire
