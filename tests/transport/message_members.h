// Members of a store for tests of MessagePlane, over any of its backends.
#ifndef THINWIRE_TESTS_TRANSPORT_MESSAGE_MEMBERS_H_
#define THINWIRE_TESTS_TRANSPORT_MESSAGE_MEMBERS_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  // A member. Those that call nobody can be called.
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

// A port on which nobody listens, yet.
inline int FreePort() {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{
      .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(socket.fd(), generic, length) != 0 || getsockname(socket.fd(), generic, &length) != 0) {
    ADD_FAILURE() << "no free port";
  }
  return ntohs(address.sin_port);
}

// Loopback. Members that call nobody listen, on a port that their rank keeps.
class ZmqMembers final : public MessageMembers {
 public:
  explicit ZmqMembers(const MessageLimits& limits) : limits_(limits) {}

  int PortOf(int rank) {
    const auto known = ports_.find(rank);
    return known != ports_.end() ? known->second : ports_[rank] = FreePort();
  }
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
  std::map<int, int> ports_;
};

// The next message, where no event may come before it.
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

// The next event, where no message may come before it.
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

inline void ExpectJoined(MessagePlane& plane, int peer) {
  const PeerEvent event = NextEvent(plane);
  EXPECT_EQ(event.kind, PeerEvent::Kind::kJoined) << event.reason;
  EXPECT_EQ(event.peer, peer);
}

inline absl::Status ExpectLost(MessagePlane& plane, int peer, Deadline deadline = Soon()) {
  const PeerEvent event = NextEvent(plane, deadline);
  EXPECT_EQ(event.kind, PeerEvent::Kind::kLost);
  EXPECT_EQ(event.peer, peer);
  return event.reason;
}

// Takes messages until the peer is lost, which may take a moment to be known.
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
