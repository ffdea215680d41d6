// Members of a store for tests of MessagePlane, over each of its backends.
#ifndef THINWIRE_TESTS_TRANSPORT_MESSAGE_MEMBERS_H_
#define THINWIRE_TESTS_TRANSPORT_MESSAGE_MEMBERS_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "transport/mesh/descriptor.h"
#include "transport/messages/in_process.h"
#include "transport/messages/zmq/zmq_messages.h"

namespace thinwire {

inline Deadline In(std::chrono::milliseconds time) { return Clock::now() + time; }
inline Deadline Soon() { return In(std::chrono::seconds(20)); }

class MessageMembers {
 public:
  virtual ~MessageMembers() = default;
  // Returns a member. Members that call nobody can be called.
  virtual std::unique_ptr<MessagePlane> Join(int rank, const std::vector<int>& calls) = 0;
};

class InProcessMembers final : public MessageMembers {
 public:
  explicit InProcessMembers(const MessageLimits& limits) : hub_(MakeMessageHub(limits)) {}
  std::unique_ptr<MessagePlane> Join(int rank, const std::vector<int>& calls) override {
    return JoinMessageHub(hub_, rank, calls);
  }

 private:
  const std::shared_ptr<MessageHub> hub_;
};

// A loopback port on which nobody listens yet. While this socket is bound the system assigns the
// port to nobody, but a process that names it may listen there, since both reuse the address.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in address{
        .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t length = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (setsockopt(socket_.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(socket_.fd(), generic, length) != 0 ||
        getsockname(socket_.fd(), generic, &length) != 0) {
      ADD_FAILURE() << "no free port";
    }
    number_ = ntohs(address.sin_port);
  }
  int number() const { return number_; }

 private:
  const Descriptor socket_;
  int number_ = 0;
};

// Members over loopback. Those that call nobody listen, each rank always on the same port.
class ZmqMembers final : public MessageMembers {
 public:
  explicit ZmqMembers(const MessageLimits& limits) : limits_(limits) {}

  int PortOf(int rank) { return ports_[rank].number(); }
  ZmqOptions Options(int rank, const std::vector<int>& calls) {
    ZmqOptions options;
    options.rank = rank;
    options.key = GroupKey("", "a token of tests");
    options.limits = limits_;
    options.listens = calls.empty();
    if (options.listens) options.port = PortOf(rank);
    for (const int peer : calls) options.calls[peer] = absl::StrCat("127.0.0.1:", PortOf(peer));
    return options;
  }
  std::unique_ptr<MessagePlane> Join(int rank, const std::vector<int>& calls) override {
    auto plane = StartZmqMessages(Options(rank, calls));
    EXPECT_TRUE(plane.ok()) << plane.status();
    return plane.ok() ? *std::move(plane) : nullptr;
  }

 private:
  const MessageLimits limits_;
  std::map<int, ReservedPort> ports_;
};

// Returns the next message; fails the test if an event comes before it.
inline Message NextMessage(MessagePlane& plane, Deadline deadline = Soon()) {
  auto event = plane.Receive(deadline);
  if (!event.ok()) {
    ADD_FAILURE() << event.status();
    return {.peer = -1, .priority = 0, .head = "", .body = {}};
  }
  if (auto* message = std::get_if<Message>(&*event)) return std::move(*message);
  const auto& peer = std::get<PeerEvent>(*event);
  ADD_FAILURE() << "rank " << peer.peer << (peer.reason.ok() ? " joined " : " is lost: ")
                << peer.reason;
  return {.peer = -1, .priority = 0, .head = "", .body = {}};
}

// Returns the next event; fails the test if a message comes before it.
inline PeerEvent NextEvent(MessagePlane& plane, Deadline deadline = Soon()) {
  auto event = plane.Receive(deadline);
  if (!event.ok()) {
    ADD_FAILURE() << event.status();
    return {.kind = PeerEvent::Kind::kLost, .peer = -1, .reason = event.status()};
  }
  if (auto* peer = std::get_if<PeerEvent>(&*event)) return std::move(*peer);
  ADD_FAILURE() << "a message of rank " << std::get<Message>(*event).peer << " came";
  return {.kind = PeerEvent::Kind::kLost, .peer = -1, .reason = {}};
}

inline void ExpectJoined(MessagePlane& plane, int peer, Deadline deadline = Soon()) {
  const PeerEvent event = NextEvent(plane, deadline);
  EXPECT_EQ(event.kind, PeerEvent::Kind::kJoined) << event.reason;
  EXPECT_EQ(event.peer, peer);
}

inline absl::Status ExpectLost(MessagePlane& plane, int peer, Deadline deadline = Soon()) {
  const PeerEvent event = NextEvent(plane, deadline);
  EXPECT_EQ(event.kind, PeerEvent::Kind::kLost);
  EXPECT_EQ(event.peer, peer);
  return event.reason;
}

// Expects that nothing comes, and that the plane reports `words` in time: an attempt to connect
// takes a moment to begin, and another to fail.
inline void ExpectNothingCame(MessagePlane& plane, const std::vector<std::string>& words) {
  const Deadline deadline = Soon();
  for (;;) {
    const auto nothing = plane.Receive(In(std::chrono::milliseconds(20)));
    ASSERT_EQ(nothing.status().code(), absl::StatusCode::kDeadlineExceeded) << nothing.status();
    const bool said = std::all_of(words.begin(), words.end(), [&](const std::string& word) {
      return absl::StrContains(nothing.status().message(), word);
    });
    if (said) return;
    ASSERT_LT(Clock::now(), deadline) << nothing.status();
  }
}

// Takes messages until the plane reports the peer as lost, which may take a moment.
inline absl::Status TakeUntilLost(MessagePlane& plane, int peer, Deadline deadline = Soon()) {
  for (;;) {
    auto event = plane.Receive(deadline);
    if (!event.ok()) return absl::InternalError(event.status().message());
    if (auto* lost = std::get_if<PeerEvent>(&*event)) {
      if (lost->peer == peer && lost->kind == PeerEvent::Kind::kLost) return lost->reason;
    }
  }
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_MESSAGE_MEMBERS_H_
