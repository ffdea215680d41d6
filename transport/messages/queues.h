// The two queues of a MessagePlane, as logic without locks or threads: the messages that wait for
// credit to one peer, and those that came and wait for their owner.
#ifndef THINWIRE_TRANSPORT_MESSAGES_QUEUES_H_
#define THINWIRE_TRANSPORT_MESSAGES_QUEUES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/messages/message_plane.h"
#include "transport/messages/send_window.h"

namespace thinwire {

// The part of the credit that a message takes.
inline size_t CostOf(const std::string& head, const std::vector<uint8_t>& body) {
  return head.size() + body.size() + kMessageCost;
}

// A message that waits for credit.
struct OutgoingMessage {
  int priority = 0;
  std::string head;
  std::vector<uint8_t> body;
};
inline size_t CostOf(const OutgoingMessage& message) { return CostOf(message.head, message.body); }

// The result of a Close whose deadline found these peers with messages that they had not taken.
inline absl::Status LeftBehind(int rank, const std::vector<int>& peers) {
  if (peers.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", rank, " has left before what it sent was taken by rank ",
                   absl::StrJoin(peers, ", ")));
}

// Values by priority, the higher first, and in the order of arrival within one.
template <typename Value>
class PriorityOrder {
 public:
  void Push(int priority, Value value) {
    values_.emplace(Key{-int64_t{priority}, next_++}, std::move(value));
  }
  bool empty() const { return values_.empty(); }
  const Value& front() const { return values_.begin()->second; }
  Value Pop() { return std::move(values_.extract(values_.begin()).mapped()); }
  void RemoveIf(const std::function<bool(const Value&)>& matches) {
    std::erase_if(values_, [&](const auto& entry) { return matches(entry.second); });
  }

 private:
  using Key = std::pair<int64_t, uint64_t>;

  uint64_t next_ = 0;
  std::map<Key, Value> values_;
};

// One direction of one connection, at its sender. `sent` and `taken` are sums since the connection
// began, so an acknowledgement that is repeated or overtaken by a later one does no harm.
//
// At most a SendWindow of bytes is under way, which is at most the credit: the window keeps
// messages where a later one can overtake them, and the credit bounds what a peer holds that is
// slow.
//
// `Message` has a `priority` and a CostOf; a simulation's messages have no bytes.
template <typename Message>
class CreditQueueOf {
 public:
  using Outgoing = Message;

  explicit CreditQueueOf(size_t credit) : window_(credit) {}

  void Push(Outgoing message) {
    const int priority = message.priority;
    waiting_.Push(priority, std::move(message));
  }

  // The message that the window lets go now. One that is larger goes once all before it was taken.
  std::optional<Outgoing> Pop(Deadline now) {
    if (waiting_.empty()) return std::nullopt;
    const size_t cost = CostOf(waiting_.front());
    if (sent_ != taken_ && sent_ - taken_ + cost > window_.bytes(cost, now)) return std::nullopt;
    sent_ += cost;
    window_.OnSent(cost, sent_, taken_, now);
    return waiting_.Pop();
  }

  // The peer has taken so many bytes since the connection began. False if that is more than was
  // sent.
  bool Acknowledge(uint64_t taken, Deadline now) {
    if (taken > sent_) return false;
    if (taken > taken_) {
      taken_ = taken;
      window_.OnTaken(taken, !waiting_.empty(), now);
    }
    return true;
  }

  // Everything was sent and taken.
  bool idle() const { return waiting_.empty() && sent_ == taken_; }

 private:
  SendWindow window_;
  uint64_t sent_ = 0, taken_ = 0;
  PriorityOrder<Outgoing> waiting_;
};
using CreditQueue = CreditQueueOf<OutgoingMessage>;

// The messages and events that came to one member.
class Inbox {
 public:
  void Join(int peer) {
    events_.push_back({.kind = PeerEvent::Kind::kJoined, .peer = peer, .reason = {}});
  }
  void Lose(int peer, absl::Status reason) {
    messages_.RemoveIf([&](const Message& message) { return message.peer == peer; });
    events_.push_back({.kind = PeerEvent::Kind::kLost, .peer = peer, .reason = std::move(reason)});
  }
  void Add(Message message) {
    const int priority = message.priority;
    messages_.Push(priority, std::move(message));
  }

  bool empty() const { return events_.empty() && messages_.empty(); }
  // The owner has not been told yet that the peer came or went.
  bool HasEventOf(int peer) const {
    return std::any_of(events_.begin(), events_.end(),
                       [&](const PeerEvent& event) { return event.peer == peer; });
  }
  // Events first: kJoined comes before the messages of its connection, and kLost has dropped them.
  MessageEvent Take() {
    if (events_.empty()) return messages_.Pop();
    PeerEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::deque<PeerEvent> events_;
  PriorityOrder<Message> messages_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESSAGES_QUEUES_H_
