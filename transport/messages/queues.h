// The two queues of a MessagePlane, as logic without locks or threads: the messages that wait for
// credit to one peer, and the received messages that wait for their owner. Also SendWindow.
#ifndef THINWIRE_TRANSPORT_MESSAGES_QUEUES_H_
#define THINWIRE_TRANSPORT_MESSAGES_QUEUES_H_

#include <algorithm>
#include <array>
#include <chrono>
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
#include "transport/store.h"

namespace thinwire {

// SendWindow: how many bytes must be under way in one direction of a connection to keep its link
// busy. Bytes under way can't be overtaken, so a larger window weakens priorities and gains
// nothing. No locks, threads or clock; its owner reports what is sent and taken, and when.
//
//     window = 1.25 * rate * round trip + kSlices * slice, at most the credit
//
// The round trip is the shortest time from a message's departure to its acknowledgement; `rate` is
// the highest recent rate at which the peer took bytes, each measured over a period in which the
// connection always had bytes to carry; `slice` is the largest recent message. That is FAST TCP's
// rule (Wei, Jin, Low and Hegde, IEEE/ACM Transactions on Networking 2006: as much as the path
// holds, plus alpha), with the rate measured as in BBR (Cardwell et al., ACM Queue 2016) rather
// than taken from the window. The slices, and a quarter of the path, allow for both directions: an
// acknowledgement waits behind what the peer sends. They also let a window that is too narrow grow:
// more than rate * round trip is under way, so the next measured rate is higher.
//
// Until there is a measurement the window is the whole credit.
class SendWindow {
 public:
  // Messages beyond what the path holds, and the least size that one counts as: small ones are
  // acknowledged together.
  static constexpr double kPath = 1.25;
  static constexpr size_t kSlices = 3, kLeastSlice = size_t{16} << 10;
  // A rate is measured over a round trip, and at least over this time. So a link that carries the
  // whole credit in less time is never measured and uses the whole credit.
  static constexpr std::chrono::milliseconds kLeastRound{5};
  static constexpr size_t kRounds = 8;  // the highest rate is that of the last kRounds
  // The shortest round trip is forgotten after this time, since paths change. A connection that is
  // never idle is then drained once: the round trip of a full one includes queueing.
  static constexpr std::chrono::seconds kForget{10};

  explicit SendWindow(size_t credit) : credit_(credit) {}

  // The bytes that may be under way if the next message has `cost` bytes. One message may always go
  // alone.
  size_t bytes(size_t cost, Deadline now) const {
    const bool is_due = round_trip_.has_value() && now >= forget_at_;
    if (is_due && !departures_.empty() && !departures_.front().alone) return 0;
    if (carried_ == 0) return credit_;
    return std::min<size_t>(credit_, carried_ + kSlices * std::max(slice_, cost));
  }

  // A message has left. `sent` and `taken` are sums of bytes since the connection began; `sent`
  // includes the message.
  void OnSent(size_t cost, uint64_t sent, uint64_t taken, Deadline now) {
    slice_ = std::max({cost, slice_ - slice_ / 64, kLeastSlice});
    departures_.push_back({.sent = sent, .alone = sent - cost == taken, .at = now});
  }

  // The peer has taken `taken` bytes so far. `waiting`: the window holds messages back.
  void OnTaken(uint64_t taken, bool waiting, Deadline now) {
    std::optional<Departure> last;
    while (!departures_.empty() && departures_.front().sent <= taken) {
      last = departures_.front();
      departures_.pop_front();
    }
    if (!last.has_value()) return;
    const Seconds trip = now - last->at;
    if (!round_trip_.has_value() || (last->alone && now >= forget_at_)) {
      round_trip_ = trip;
      forget_at_ = now + kForget;
    }
    round_trip_ = std::min(*round_trip_, trip);

    const uint64_t under_way = departures_.empty() ? 0 : departures_.back().sent - taken;
    const Seconds length = now - round_.start;
    if (round_.is_open && length >= std::max<Seconds>(*round_trip_, kLeastRound)) {
      Measure(static_cast<double>(taken - round_.taken) / length.count());
      round_.is_open = false;
    }
    if (!waiting && under_way < 2 * slice_) {
      round_.is_open = false;  // the rate would be that of the program, not of the link
    } else if (!round_.is_open) {
      round_ = {.is_open = true, .start = now, .taken = taken};
    }
  }

 private:
  using Seconds = std::chrono::duration<double>;

  struct Departure {
    uint64_t sent = 0;   // sum of bytes, this message included
    bool alone = false;  // nothing else was under way
    Deadline at;
  };
  // A period in which the connection always had bytes to carry.
  struct Round {
    bool is_open = false;
    Deadline start;
    uint64_t taken = 0;  // bytes taken before it
  };

  void Measure(double rate) {
    rates_[measured_++ % kRounds] = rate;
    const double highest = *std::max_element(rates_.begin(), rates_.end());
    const double path = kPath * highest * round_trip_->count();
    carried_ = 1 + static_cast<size_t>(std::min(path, static_cast<double>(credit_)));
  }

  const size_t credit_;
  size_t slice_ = kLeastSlice;
  std::deque<Departure> departures_;  // of messages under way
  std::optional<Seconds> round_trip_;
  Deadline forget_at_;
  Round round_;
  std::array<double, kRounds> rates_{};  // bytes per second
  size_t measured_ = 0;
  size_t carried_ = 0;  // bytes that the path holds; 0: unknown
};

// The bytes of credit that a message uses.
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

// The result of a Close at whose deadline these peers had not taken all their messages.
inline absl::Status LeftBehind(int rank, const std::vector<int>& peers) {
  if (peers.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", rank, " has left before what it sent was taken by rank ",
                   absl::StrJoin(peers, ", ")));
}

// Values by priority, the higher first; those of equal priority in the order of arrival.
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
// began, so a repeated or late acknowledgement does no harm.
//
// At most a SendWindow of bytes, which is at most the credit, is under way: the window keeps
// messages where a later one can overtake them, and the credit bounds what a slow peer holds.
//
// `Message` has a `priority` and a CostOf; the messages of a simulation have no bytes.
template <typename Message>
class CreditQueueOf {
 public:
  using Outgoing = Message;

  explicit CreditQueueOf(size_t credit) : window_(credit) {}

  void Push(Outgoing message) {
    const int priority = message.priority;
    waiting_.Push(priority, std::move(message));
  }

  // Returns the next message if the window allows it. One that is larger than the window goes once
  // all before it were taken.
  std::optional<Outgoing> Pop(Deadline now) {
    if (waiting_.empty()) return std::nullopt;
    const size_t cost = CostOf(waiting_.front());
    if (sent_ != taken_ && sent_ - taken_ + cost > window_.bytes(cost, now)) return std::nullopt;
    sent_ += cost;
    window_.OnSent(cost, sent_, taken_, now);
    return waiting_.Pop();
  }

  // The peer has taken this many bytes since the connection began. False if that is more than was
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
  // True if an event of the peer waits for the owner.
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
