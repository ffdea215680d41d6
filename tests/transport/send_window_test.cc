// The send windows of both ends of a connection, over a link in virtual time.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/effort.h"
#include "transport/messages/queues.h"

namespace thinwire {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr size_t kCredit = size_t{2} << 20;
constexpr size_t kInt4 = 34 << 10, kFp32 = 256 << 10;  // slices of 64 Ki elements
constexpr size_t kSmall = 4000;
constexpr double kAck = 64;  // bytes

struct Path {
  double rate = 0, delay = 0;  // in each direction: bytes/s, and s
  double busy = 0;             // s that the receiver needs per message
};

// Like a CreditQueue, but without a window.
class WholeCredit {
 public:
  explicit WholeCredit(size_t credit) : credit_(credit) {}
  void Push(CreditQueue::Outgoing message) { waiting_.push_back(std::move(message)); }
  std::optional<CreditQueue::Outgoing> Pop(Deadline) {
    if (waiting_.empty()) return std::nullopt;
    const size_t cost = CostOf(waiting_.front().head, waiting_.front().body);
    if (sent_ != taken_ && sent_ - taken_ + cost > credit_) return std::nullopt;
    sent_ += cost;
    CreditQueue::Outgoing next = std::move(waiting_.front());
    waiting_.pop_front();
    return next;
  }
  bool Acknowledge(uint64_t taken, Deadline) {
    taken_ = taken;
    return true;
  }

 private:
  const size_t credit_;
  uint64_t sent_ = 0, taken_ = 0;
  std::deque<CreditQueue::Outgoing> waiting_;
};

// Two members and their link, which carries messages and acknowledgements in one stream.
template <typename Queue>
class Link {
 public:
  explicit Link(Path path) : path(path) {}

  double now() const { return now_; }
  double taken(int end) const { return static_cast<double>(ends_[end].taken); }  // of its messages
  double under_way(int end) const {
    return static_cast<double>(ends_[end].sent - ends_[end].taken);
  }

  // Sends a message from `end`.
  void Send(int end, size_t bytes, int priority = 0, std::function<void()> when_taken = {}) {
    End& from = ends_[end];
    from.on_taken[priority].push_back(std::move(when_taken));
    from.queue.Push({.priority = priority, .head = {}, .body = std::vector<uint8_t>(bytes)});
    Move(end);
  }
  void At(double time, std::function<void()> event) {
    events_.emplace(std::max(time, now_), std::move(event));
  }
  void RunUntil(double time) {
    while (!events_.empty() && events_.begin()->first <= time) {
      auto event = events_.extract(events_.begin());
      now_ = event.key();
      event.mapped()();
    }
    now_ = time;
  }
  // Keeps messages waiting at `end` until `time`.
  void KeepFull(int end, size_t bytes, double time) {
    for (size_t i = 0; i < 2 * kCredit / bytes; ++i) {
      Send(end, bytes, 0, [=, this] { Refill(end, bytes, time); });
    }
  }

  Path path;

 private:
  struct End {
    Queue queue{kCredit};
    uint64_t sent = 0, taken = 0;
    double link_free = 0, busy_until = 0;
    std::map<int, std::vector<std::function<void()>>> on_taken;
  };

  Deadline Time() const {
    return Deadline(std::chrono::duration_cast<Clock::duration>(Seconds(now_)));
  }
  void Refill(int end, size_t bytes, double time) {
    if (now_ < time) Send(end, bytes, 0, [=, this] { Refill(end, bytes, time); });
  }
  // Returns the arrival time of the last of `bytes` bytes that `end` sends now.
  double Arrival(int end, double bytes) {
    End& from = ends_[end];
    from.link_free = std::max(now_, from.link_free) + bytes / path.rate;
    return from.link_free + path.delay;
  }
  void Move(int end) {
    while (auto message = ends_[end].queue.Pop(Time())) {
      const size_t cost = CostOf(message->head, message->body);
      ends_[end].sent += cost;
      auto& waiting = ends_[end].on_taken[message->priority];
      auto on_taken = std::move(waiting.front());
      waiting.erase(waiting.begin());
      At(Arrival(end, static_cast<double>(cost)), [=, this, on_taken = std::move(on_taken)] {
        End& to = ends_[1 - end];
        to.busy_until = std::max(now_, to.busy_until) + path.busy;
        At(to.busy_until, [=, this] { Take(end, cost, on_taken); });
      });
    }
  }
  void Take(int end, size_t cost, const std::function<void()>& on_taken) {
    ends_[end].taken += cost;
    const uint64_t taken = ends_[end].taken;
    if (on_taken) on_taken();
    At(Arrival(1 - end, kAck), [=, this] {
      ASSERT_TRUE(ends_[end].queue.Acknowledge(taken, Time()));
      Move(end);
    });
  }

  double now_ = 0;
  std::array<End, 2> ends_;
  std::multimap<double, std::function<void()>> events_;
};

using Connection = Link<CreditQueue>;

// Returns the bytes/s that the peer takes from one end, or in both directions if `end` is kBoth.
constexpr int kBoth = 2;
template <typename Queue>
double Rate(Link<Queue>& link, int end, double from, double until) {
  const auto taken = [&] { return end == kBoth ? link.taken(0) + link.taken(1) : link.taken(end); };
  link.RunUntil(from);
  const double before = taken();
  link.RunUntil(until);
  return (taken() - before) / (until - from);
}

constexpr double kMegabit = 1e6 / 8;

struct Place {
  double megabits, round_trip;
  size_t slice;
};

class PlacesTest : public testing::TestWithParam<Place> {
 protected:
  double rate() const { return GetParam().megabits * kMegabit; }
  double round_trip() const { return GetParam().round_trip; }
  size_t slice() const { return GetParam().slice; }
  // The link's rate under the whole credit, which holds whole messages.
  double reachable() const {
    const size_t cost = slice() + kMessageCost;
    const auto most = static_cast<double>(kCredit / cost * cost);
    return std::min(rate(), most / (round_trip() + static_cast<double>(cost) / rate()));
  }
  double message() const { return static_cast<double>(std::max(slice(), size_t{16384})) + 64; }
  Path path() const { return {.rate = rate(), .delay = round_trip() / 2}; }
  // The time after which a window has settled, and the time over which rates are measured.
  double settled() const { return 0.1 + 2 * kCredit / rate() + 15 * round_trip(); }
  double span() const { return 0.2 + 20 * round_trip() + 40 * message() / rate(); }
};

std::vector<Place> Places() {
  std::vector<Place> places;
  for (const double megabits : {50.0, 200.0, 1000.0, 10000.0}) {
    for (const double round_trip : {0.0001, 0.002, 0.02, 0.1}) {
      for (const size_t slice : {kSmall, kInt4, kFp32}) {
        if (megabits * round_trip > 100 && slice == kSmall) continue;  // takes long
        if (kSanitized && (megabits > 1000 || slice == kSmall)) continue;
        places.push_back({megabits, round_trip, slice});
      }
    }
  }
  return places;
}

INSTANTIATE_TEST_SUITE_P(All, PlacesTest, testing::ValuesIn(Places()), [](const auto& info) {
  const Place& place = info.param;
  return std::to_string(static_cast<int>(place.megabits)) + "MbitUs" +
         std::to_string(static_cast<int>(place.round_trip * 1e6)) + "Bytes" +
         std::to_string(place.slice);
});

TEST_P(PlacesTest, ALinkIsFullInOneDirection) {
  Connection connection(path());
  connection.KeepFull(0, slice(), settled() + 2 * span());
  EXPECT_GE(Rate(connection, 0, settled(), settled() + span()), 0.95 * reachable());
}

TEST_P(PlacesTest, InBothDirectionsItIsAsFastAsWithTheWholeCredit) {
  const auto rate_of = [this](auto link) {
    link.KeepFull(0, slice(), settled() + 2 * span());
    link.KeepFull(1, slice(), settled() + 2 * span());
    return Rate(link, kBoth, settled(), settled() + span());
  };
  EXPECT_GE(rate_of(Connection(path())), 0.93 * rate_of(Link<WholeCredit>(path())));
}

TEST_P(PlacesTest, NoMoreIsUnderWayThanTheLinkNeeds) {
  Connection connection(path());
  connection.KeepFull(0, slice(), settled() + 2 * span());
  // A round trip includes the message. On very fast links up to 5 ms of the rate may be under way.
  const double most = 1.3 * (rate() * round_trip() + message()) + 5 * message();
  for (double time = settled(); time < settled() + span(); time += span() / 50) {
    connection.RunUntil(time);
    ASSERT_LE(connection.under_way(0), std::max(most, rate() * 0.005)) << time;
  }
}

TEST_P(PlacesTest, AnUrgentMessageOvertakesAllButTheWindow) {
  Connection connection(path());
  connection.KeepFull(0, slice(), settled() + 2 * span());
  connection.RunUntil(settled());
  double came = 0;
  connection.Send(0, slice(), 1, [&] { came = connection.now(); });
  connection.RunUntil(settled() + span());
  EXPECT_GT(came, 0);
  EXPECT_LE(came - settled(), 1.4 * round_trip() + std::max(8 * message() / rate(), 0.01));
}

// Messages at a program's start show nothing about its link.
TEST_P(PlacesTest, AfterATrickleOfSmallMessagesABurstGoesAtFullSpeed) {
  Connection connection(path());
  for (int i = 0; i < 500; ++i) {
    connection.At(0.004 * i, [&] { connection.Send(0, 100); });
  }
  connection.RunUntil(2.5);
  connection.KeepFull(0, slice(), 2.5 + span());
  const double start = 2.5 + 2 * round_trip();
  EXPECT_GE(Rate(connection, 0, start, start + span()), 0.8 * reachable());
}

// As in training steps.
TEST_P(PlacesTest, ABurstAfterARestTakesAsLongAsWithTheWholeCredit) {
  const double bytes = 4e6;
  const int messages = static_cast<int>(bytes / static_cast<double>(slice()));
  const auto seconds_of = [&](auto link) {
    double all = 0;
    for (int burst = 0; burst < 5; ++burst) {
      const double start = link.now();
      double last = 0;
      for (int i = 0; i < messages; ++i) link.Send(0, slice(), 0, [&] { last = link.now(); });
      link.RunUntil(start + 0.02 + 2 * (round_trip() + bytes / reachable()));
      all += last - start;
    }
    return all;
  };
  EXPECT_LE(seconds_of(Connection(path())), 1.1 * seconds_of(Link<WholeCredit>(path())));
}

TEST(SendWindow, AConnectionThatNeverRestsIsEmptiedNowAndThen) {
  for (const double megabits : {50.0, 1000.0}) {
    Connection connection({.rate = megabits * kMegabit, .delay = 0.005});
    connection.KeepFull(0, kInt4, 60);
    EXPECT_GE(Rate(connection, 0, 2, 50), 0.95 * megabits * kMegabit);
    double most = 0;  // after the window's own queue is emptied
    for (double time = 51; time < 55; time += 0.0517) {
      connection.RunUntil(time);
      most = std::max(most, connection.under_way(0));
    }
    EXPECT_LE(most, megabits * kMegabit * 0.01 + 7 * kInt4);
  }
}

TEST(SendWindow, FollowsARateThatFallsAndRises) {
  Connection connection({.rate = 200 * kMegabit, .delay = 0.01});
  connection.KeepFull(0, kInt4, 60);
  connection.RunUntil(2);
  const double fast = connection.under_way(0);
  connection.path.rate = 20 * kMegabit;
  EXPECT_GE(Rate(connection, 0, 4, 8), 0.95 * 20 * kMegabit);
  EXPECT_LE(connection.under_way(0), 0.6 * fast);
  connection.path.rate = 200 * kMegabit;
  EXPECT_GE(Rate(connection, 0, 9, 13), 0.95 * 200 * kMegabit);
}

TEST(SendWindow, FollowsAPathThatGetsLonger) {
  Connection connection({.rate = 200 * kMegabit, .delay = 0.0005});
  connection.KeepFull(0, kInt4, 60);
  connection.RunUntil(3);
  connection.path.delay = 0.02;
  EXPECT_GE(Rate(connection, 0, 15, 25), 0.95 * 200 * kMegabit);
}

TEST(SendWindow, ASlowPeerHoldsSlicesAndNotACredit) {
  Connection connection({.rate = 1000 * kMegabit, .delay = 0.0001, .busy = 0.002});
  connection.KeepFull(0, kInt4, 10);
  EXPECT_GE(Rate(connection, 0, 1, 5), 0.99 * kInt4 / 0.002);
  EXPECT_LE(connection.under_way(0), 8 * kInt4);
}

TEST(SendWindow, IsTheWholeCreditUntilThereIsAMeasurement) {
  SendWindow window(kCredit);
  EXPECT_EQ(window.bytes(kInt4, Deadline()), kCredit);
  uint64_t sent = 0;
  const auto at = [](int us) { return Deadline() + std::chrono::microseconds(us); };
  for (int i = 0; i < 20; ++i) {  // each message alone
    sent += 1000;
    window.OnSent(1000, sent, sent - 1000, at(10000 * i));
    window.OnTaken(sent, false, at(10000 * i + 9000));
    EXPECT_EQ(window.bytes(kInt4, at(10000 * i + 9000)), kCredit);
  }
}

}  // namespace
}  // namespace thinwire
