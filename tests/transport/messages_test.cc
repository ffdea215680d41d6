// The contract of transport/messages/message_plane.h, the same for every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/leaks.h"
#include "tests/transport/message_members.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Kind {
  const char* name;
  std::function<std::unique_ptr<MessageMembers>(const MessageLimits&)> make;
};

constexpr int kServer = 0;

// Returns bytes that depend on `number` and on their position.
std::vector<uint8_t> Body(size_t bytes, unsigned number) {
  std::vector<uint8_t> body(bytes);
  for (size_t i = 0; i < bytes; ++i) body[i] = static_cast<uint8_t>(i * 31 + i / 251 + number);
  return body;
}

class MessagesTest : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<MessageMembers> Make(const MessageLimits& limits = {}) {
    return GetParam().make(limits);
  }
  // A server and a worker that are connected.
  struct Pair {
    std::unique_ptr<MessageMembers> members;
    std::unique_ptr<MessagePlane> server, worker;
  };
  Pair MakePair(const MessageLimits& limits = {}) {
    Pair pair{.members = Make(limits), .server = nullptr, .worker = nullptr};
    pair.server = pair.members->Join(kServer, {});
    pair.worker = pair.members->Join(1, {kServer});
    ExpectJoined(*pair.server, 1);
    ExpectJoined(*pair.worker, kServer);
    return pair;
  }
};
INSTANTIATE_TEST_SUITE_P(All, MessagesTest,
                         testing::Values(Kind{"InProcess",
                                              [](const MessageLimits& limits) {
                                                return std::make_unique<InProcessMembers>(limits);
                                              }},
                                         Kind{"Zmq",
                                              [](const MessageLimits& limits) {
                                                return std::make_unique<ZmqMembers>(limits);
                                              }}),
                         [](const auto& info) { return info.param.name; });

TEST_P(MessagesTest, MessagesOfAllSizesArriveWholeAndInOrderBothWays) {
  Pair pair = MakePair();
  const std::vector<size_t> sizes = {0,          1,      1000,   256 * 1024 - 1,
                                     256 * 1024, 262145, 700000, 5 * 1024 * 1024};
  const auto send = [&](MessagePlane& plane, int to) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      // Some heads are longer than a piece, so that the body begins within one.
      const std::string head(i % 3 == 2 ? 300000 : i, static_cast<char>('a' + i));
      ASSERT_TRUE(plane.Send(to, 0, head, Body(sizes[i], i)).ok());
    }
  };
  const auto receive = [&](MessagePlane& plane, int from) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Message message = NextMessage(plane);
      ASSERT_EQ(message.peer, from);
      EXPECT_EQ(message.head, std::string(i % 3 == 2 ? 300000 : i, static_cast<char>('a' + i)));
      EXPECT_TRUE(message.body == Body(sizes[i], i)) << i;
    }
  };
  std::thread server([&] {
    send(*pair.server, 1);
    receive(*pair.server, 1);
  });
  send(*pair.worker, kServer);
  receive(*pair.worker, kServer);
  server.join();
  EXPECT_EQ(pair.worker->bytes_sent(), pair.server->bytes_sent());
  EXPECT_GT(pair.worker->bytes_sent(), 5u * 1024 * 1024);
}

TEST_P(MessagesTest, ManyWorkersAndServersMoveEveryMessageOnce) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  constexpr int kServers = 2, kWorkers = 4, kMessages = 200;
  const auto members = Make({.credit = 20000});
  std::vector<std::unique_ptr<MessagePlane>> servers, workers;
  for (int s = 0; s < kServers; ++s) servers.push_back(members->Join(s, {}));
  for (int w = 0; w < kWorkers; ++w) workers.push_back(members->Join(kServers + w, {0, 1}));
  std::vector<std::thread> threads;
  for (auto& server : servers) {
    threads.emplace_back([&] {  // echoes its messages
      int left = kWorkers * kMessages, joined = 0;
      while (left > 0) {
        auto event = server->Receive(Soon());
        ASSERT_TRUE(event.ok()) << event.status();
        if (auto* message = std::get_if<Message>(&*event)) {
          --left;
          ASSERT_TRUE(
              server
                  ->Send(message->peer, message->priority, message->head, std::move(message->body))
                  .ok());
        } else {
          ++joined;
        }
      }
      EXPECT_EQ(joined, kWorkers);
    });
  }
  for (int w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      MessagePlane& worker = *workers[w];
      std::mt19937 random(seed + w);
      for (int s = 0; s < kServers; ++s) NextEvent(worker);
      for (int i = 0; i < kMessages; ++i) {
        for (int s = 0; s < kServers; ++s) {
          const std::string head = std::to_string(i);
          ASSERT_TRUE(worker.Send(s, i % 5, head, Body(random() % 9000, i + w + s)).ok());
        }
      }
      std::vector<std::vector<int>> seen(kServers, std::vector<int>(kMessages));
      for (int i = 0; i < kMessages * kServers; ++i) {
        const Message message = NextMessage(worker);
        ASSERT_TRUE(message.peer >= 0 && message.peer < kServers);
        const int number = std::stoi(message.head);
        EXPECT_EQ(++seen[message.peer][number], 1);
        EXPECT_EQ(message.priority, number % 5);
        EXPECT_TRUE(message.body ==
                    Body(message.body.size(), number + w + static_cast<unsigned>(message.peer)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(MessagesTest, AHigherPriorityOvertakesAllButOneCreditOfBytes) {
  constexpr size_t kCredit = 100000, kBody = 10000, kCost = kBody + kMessageCost + 1;
  Pair pair = MakePair({.credit = kCredit});
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(pair.worker->Send(kServer, 0, "l", Body(kBody, 0)).ok());
  }
  // The count stops at one credit once that has been sent.
  const Deadline deadline = Soon();
  while (pair.worker->bytes_sent() < kCredit / kCost * (kBody + 1) && Clock::now() < deadline) {
    std::this_thread::yield();
  }
  ASSERT_TRUE(pair.worker->Send(kServer, 5, "h", Body(kBody, 0)).ok());
  ASSERT_TRUE(pair.worker->Send(kServer, -5, "last", {}).ok());
  ASSERT_TRUE(pair.worker->Send(kServer, 5, "i", Body(kBody, 0)).ok());
  EXPECT_EQ(pair.worker->bytes_sent(), kCredit / kCost * (kBody + 1));
  std::string order;
  for (int i = 0; i < 52; ++i) order += NextMessage(*pair.server).head;
  EXPECT_EQ(NextMessage(*pair.server).head, "last");
  const size_t at = order.find('h');
  EXPECT_LE(at, kCredit / kCost) << order;
  EXPECT_GT(order.find('i'), at) << order;
  EXPECT_LE(order.find('i'), kCredit / kCost + 2) << order;
}

TEST_P(MessagesTest, AReceiverTakesTheHighestPriorityFirst) {
  constexpr int kMessages = 2000;
  Pair pair = MakePair();
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(pair.worker->Send(kServer, i % 4, std::to_string(10000 + i), {}).ok());
  }
  const Deadline deadline = Soon();
  while (pair.worker->bytes_sent() < 5 * kMessages && Clock::now() < deadline) {
    std::this_thread::yield();
  }
  // It is sent after all others, so they have arrived when it does: at once in one process. Over a
  // network some may be taken before it arrives.
  ASSERT_TRUE(pair.worker->Send(kServer, 9, "first", {}).ok());
  int left = kMessages;
  while (NextMessage(*pair.server).head != "first") --left;
  if (std::string_view(GetParam().name) == "InProcess") {
    EXPECT_EQ(left, kMessages);
  }
  int last = 3;
  std::vector<int> numbers(4, -1);
  for (; left > 0; --left) {
    const Message message = NextMessage(*pair.server);
    const int number = std::stoi(message.head);
    ASSERT_LE(message.priority, last);
    last = message.priority;
    ASSERT_GT(number, std::exchange(numbers[message.priority], number));
  }
}

TEST_P(MessagesTest, AMemberThatTakesNothingHoldsOneCreditOfEachPeer) {
  constexpr size_t kCredit = 64000;
  constexpr int kWorkers = 3;
  const auto members = Make({.credit = kCredit});
  const auto server = members->Join(kServer, {});
  std::vector<std::unique_ptr<MessagePlane>> workers;
  for (int w = 1; w <= kWorkers; ++w) {
    workers.push_back(members->Join(w, {kServer}));
    ExpectJoined(*server, w);
    ExpectJoined(*workers.back(), kServer);
  }
  for (const auto& worker : workers) {
    for (int i = 0; i < 1000; ++i) {
      ASSERT_TRUE(worker->Send(kServer, 0, "", Body(i % 2000, i)).ok());  // never waits
    }
  }
  std::this_thread::sleep_for(milliseconds(100));
  for (const auto& worker : workers) EXPECT_LE(worker->bytes_sent(), kCredit);
  size_t taken = 0;
  for (int i = 0; i < 1000 * kWorkers; ++i) {
    taken += NextMessage(*server).body.size();
    size_t sent = 0;
    for (const auto& worker : workers) sent += worker->bytes_sent();
    ASSERT_LE(sent, taken + kWorkers * kCredit) << i;
  }
}

TEST_P(MessagesTest, AMessageLargerThanTheCreditGoesAlone) {
  Pair pair = MakePair({.credit = 1000});
  ASSERT_TRUE(pair.worker->Send(kServer, 0, "small", {}).ok());
  ASSERT_TRUE(pair.worker->Send(kServer, 0, "large", Body(3 << 20, 1)).ok());
  ASSERT_TRUE(pair.worker->Send(kServer, 0, "after", {}).ok());
  const Deadline deadline = Soon();
  while (pair.worker->bytes_sent() < 5 && Clock::now() < deadline) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(50));  // enough for an error to show
  EXPECT_EQ(pair.worker->bytes_sent(), 5u);
  EXPECT_EQ(NextMessage(*pair.server).head, "small");
  const Message large = NextMessage(*pair.server);
  EXPECT_EQ(large.head, "large");
  EXPECT_TRUE(large.body == Body(3 << 20, 1));
  EXPECT_EQ(NextMessage(*pair.server).head, "after");
}

TEST_P(MessagesTest, WhatCannotBeSentIsRefusedWithAReason) {
  Pair pair = MakePair({.max_message = 5000});
  EXPECT_EQ(pair.worker->Send(kServer, 0, "x", Body(5000, 0)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(pair.worker->Send(kServer, 0, "x", Body(4999, 0)).ok());
  const absl::Status unknown = pair.worker->Send(7, 0, "", {});
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(unknown.message().find("rank 7"), absl::string_view::npos) << unknown;
}

TEST_P(MessagesTest, WorkersThatComeBeforeTheirServerMeetIt) {
  const auto members = Make();
  const auto worker = members->Join(3, {kServer});
  ExpectNothingCame(*worker, {"rank 0 is not connected"});
  const auto server = members->Join(kServer, {});
  ExpectJoined(*server, 3);
  ExpectJoined(*worker, kServer);
  EXPECT_EQ(worker->Receive(In(milliseconds(0))).status().message().find("not connected"),
            absl::string_view::npos);
}

TEST_P(MessagesTest, AMemberThatDiesIsLostAtOnceAndWelcomeAgain) {
  Pair pair = MakePair({.timeout = seconds(60)});  // longer than anything here takes
  ASSERT_TRUE(pair.worker->Send(kServer, 0, "taken", {}).ok());
  EXPECT_EQ(NextMessage(*pair.server).head, "taken");
  for (const bool of_server : {false, true, false}) {
    auto& dying = of_server ? pair.server : pair.worker;
    auto& staying = of_server ? pair.worker : pair.server;
    const int rank = dying->rank();
    dying.reset();
    EXPECT_EQ(ExpectLost(*staying, rank).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(staying->Send(rank, 0, "", {}).code(), absl::StatusCode::kUnavailable);
    dying = pair.members->Join(rank, of_server ? std::vector<int>{} : std::vector<int>{kServer});
    ExpectJoined(*staying, rank);
    ExpectJoined(*dying, staying->rank());
    ASSERT_TRUE(staying->Send(rank, 0, "again", {}).ok());
    EXPECT_EQ(NextMessage(*dying).head, "again");
    ASSERT_TRUE(dying->Send(staying->rank(), 0, "and back", {}).ok());
    EXPECT_EQ(NextMessage(*staying).head, "and back");
  }
}

// Otherwise it might arrive before the owner learns that the peer was lost.
TEST_P(MessagesTest, NothingIsSentToAPeerThatIsBackBeforeTheOwnerKnows) {
  Pair pair = MakePair();
  pair.worker.reset();
  pair.worker = pair.members->Join(1, {kServer});
  ExpectJoined(*pair.worker, kServer);
  EXPECT_EQ(pair.server->Send(1, 0, "early", {}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ExpectLost(*pair.server, 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.server->Send(1, 0, "early", {}).code(), absl::StatusCode::kUnavailable);
  ExpectJoined(*pair.server, 1);
  ASSERT_TRUE(pair.server->Send(1, 0, "in time", {}).ok());
  EXPECT_EQ(NextMessage(*pair.worker).head, "in time");
}

TEST_P(MessagesTest, ANewMemberTakesThePlaceOfOneOfItsRank) {
  Pair pair = MakePair();
  const auto second = pair.members->Join(1, {kServer});
  EXPECT_EQ(ExpectLost(*pair.server, 1).code(), absl::StatusCode::kUnavailable);
  ExpectJoined(*pair.server, 1);
  ExpectJoined(*second, kServer);
  const absl::Status replaced = ExpectLost(*pair.worker, kServer);
  EXPECT_EQ(replaced.code(), absl::StatusCode::kFailedPrecondition) << replaced;
  ASSERT_TRUE(pair.server->Send(1, 0, "to the new one", {}).ok());
  EXPECT_EQ(NextMessage(*second).head, "to the new one");
  // The old member does not come back.
  EXPECT_EQ(pair.worker->Receive(In(milliseconds(100))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(pair.server->Receive(In(milliseconds(0))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_P(MessagesTest, WhatWasNotTakenOfALostPeerIsDropped) {
  Pair pair = MakePair();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(pair.worker->Send(kServer, 3, "old", {}).ok());
  EXPECT_EQ(NextMessage(*pair.server).head, "old");
  pair.worker.reset();
  EXPECT_EQ(TakeUntilLost(*pair.server, 1).code(), absl::StatusCode::kUnavailable);
  pair.worker = pair.members->Join(1, {kServer});
  ExpectJoined(*pair.server, 1);
  ExpectJoined(*pair.worker, kServer);
  ASSERT_TRUE(pair.worker->Send(kServer, 0, "new", {}).ok());
  EXPECT_EQ(NextMessage(*pair.server).head, "new");
}

TEST_P(MessagesTest, CloseWaitsUntilPeersHaveTakenEverything) {
  Pair pair = MakePair({.credit = 5000});
  constexpr int kMessages = 100;
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(pair.worker->Send(kServer, 0, "", Body(1000, i)).ok());
  }
  std::atomic<bool> closed = false;
  std::thread closing([&] {
    EXPECT_TRUE(pair.worker->Close(Soon()).ok());
    closed = true;
  });
  // Messages sent before the other thread begins to close come after all that are queued.
  int more = 0;
  absl::Status refused;
  for (const Deadline deadline = Soon(); refused.ok() && Clock::now() < deadline;) {
    std::this_thread::sleep_for(milliseconds(1));
    refused = pair.worker->Send(kServer, -1, "more", {});
    if (refused.ok()) ++more;
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kCancelled) << refused;
  std::this_thread::sleep_for(milliseconds(50));  // enough for an error to show
  EXPECT_FALSE(closed);
  for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(NextMessage(*pair.server).body == Body(1000, i));
  for (; more > 0; --more) EXPECT_EQ(NextMessage(*pair.server).head, "more");
  closing.join();
  const absl::Status left = ExpectLost(*pair.server, 1);
  EXPECT_EQ(left.code(), absl::StatusCode::kCancelled) << left;
  EXPECT_NE(left.message().find("rank 1"), absl::string_view::npos) << left;
  EXPECT_EQ(pair.worker->Receive(Soon()).status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(pair.worker->Close(Soon()).ok());
}

TEST_P(MessagesTest, CloseOfAServerIsCancelledForItsWorkersAndNamesThoseBehind) {
  Pair pair = MakePair();
  ASSERT_TRUE(pair.server->Send(1, 0, "not taken", {}).ok());
  const absl::Status closed = pair.server->Close(In(milliseconds(50)));
  EXPECT_EQ(closed.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(closed.message().find("rank 1"), absl::string_view::npos) << closed;
  EXPECT_EQ(TakeUntilLost(*pair.worker, kServer).code(), absl::StatusCode::kCancelled);
}

TEST_P(MessagesTest, CloseWakesWhoReceives) {
  Pair pair = MakePair();
  std::thread receiving([&] {
    EXPECT_EQ(pair.worker->Receive(Soon()).status().code(), absl::StatusCode::kCancelled);
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_TRUE(pair.worker->Close(Soon()).ok());
  receiving.join();
}

TEST_P(MessagesTest, ThreadsSendWhileOthersReceiveAndMembersComeAndGo) {
  const auto members = Make({.credit = 30000});
  const auto server = members->Join(kServer, {});
  std::atomic<bool> over = false;
  std::thread serving([&] {
    while (!over) {
      auto event = server->Receive(In(milliseconds(50)));
      if (!event.ok()) continue;
      if (auto* message = std::get_if<Message>(&*event)) {
        // The sender may have left meanwhile.
        server->Send(message->peer, 0, message->head, std::move(message->body)).IgnoreError();
      }
    }
  });
  std::vector<std::thread> threads;
  for (int rank = 1; rank <= 3; ++rank) {
    threads.emplace_back([&, rank] {
      for (int life = 0; life < 5; ++life) {
        const auto worker = members->Join(rank, {kServer});
        ExpectJoined(*worker, kServer);
        std::vector<std::thread> senders;
        for (int thread = 0; thread < 3; ++thread) {
          senders.emplace_back([&] {
            for (int i = 0; i < 30; ++i) {
              ASSERT_TRUE(worker->Send(kServer, i % 3, "m", Body(i * 100, i)).ok());
            }
          });
        }
        for (int i = 0; i < 90; ++i) EXPECT_EQ(NextMessage(*worker).head, "m");
        for (std::thread& sender : senders) sender.join();
        if (life % 2 == 0) {
          EXPECT_TRUE(worker->Close(Soon()).ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  serving.join();
}

TEST_P(MessagesTest, NothingIsLeftOfMembersThatHaveGone) {
  const auto live = [&] {
    Pair pair = MakePair();
    ASSERT_TRUE(pair.worker->Send(kServer, 0, "", Body(100000, 1)).ok());
    NextMessage(*pair.server);
  };
  live();
  const Held before = Held::Now();
  for (int i = 0; i < 10; ++i) live();
  const Held after = Held::Settled(before);
  EXPECT_TRUE(after <= before) << before << " before, then " << after;
}

}  // namespace
}  // namespace thinwire
