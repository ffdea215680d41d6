// Connecting a group: ranks that do not come, and strangers.
#include "transport/mesh/mesh.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "tests/leaks.h"
#include "tests/transport/calling.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using Result = absl::StatusOr<std::vector<Descriptor>>;

// Returns options for `size` ranks that meet in a new store.
std::vector<MeshOptions> Group(int size, milliseconds timeout) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  std::vector<MeshOptions> ranks(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks[rank] = {.rank = rank,
                   .size = size,
                   .store = store,
                   .prefix = "t/",
                   .address = *LocalAddress("", ""),
                   .key_file = "",
                   .digest = "same",
                   .deadline = Clock::now() + timeout};
  }
  return ranks;
}

Result Connect(const MeshOptions& options) {
  std::vector<Descriptor> connections;
  const absl::Status status = ConnectMesh(options, connections);
  return status.ok() ? Result(std::move(connections)) : status;
}

// Connects the ranks, on a thread per rank; returns the results by rank.
std::vector<Result> ConnectAll(const std::vector<MeshOptions>& ranks) {
  std::vector<Result> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] { results[rank] = Connect(ranks[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// Meets the others, like a rank that stops or dies before it connects. Returns an error if it could
// not in time.
absl::StatusOr<Listener> TryToMeet(const MeshOptions& options) {
  absl::StatusOr<Listener> listener = Listener::Open(options.address);
  if (!listener.ok()) return listener;
  const absl::Status met = Meet(options, "", listener->address()).status();
  return met.ok() ? std::move(listener) : absl::StatusOr<Listener>(met);
}

absl::StatusOr<Listener> OnlyMeet(const MeshOptions& options) {
  absl::StatusOr<Listener> listener = TryToMeet(options);
  EXPECT_TRUE(listener.ok()) << listener.status();
  return listener;
}

TEST(Mesh, EveryConnectionLeadsToTheRankThatItIsSaidTo) {
  std::vector<Result> results = ConnectAll(Group(5, std::chrono::seconds(20)));
  for (const Result& result : results) ASSERT_TRUE(result.ok()) << result.status();
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_FALSE((*results[rank])[rank].valid());
    for (int peer = 0; peer < 5; ++peer) {
      const char said = static_cast<char>(rank * 16 + peer);
      if (peer == rank) continue;
      ASSERT_EQ(write((*results[rank])[peer].fd(), &said, 1), 1);
    }
  }
  for (int rank = 0; rank < 5; ++rank) {
    for (int peer = 0; peer < 5; ++peer) {
      char heard[2];
      if (peer == rank) continue;
      ASSERT_EQ(read((*results[rank])[peer].fd(), heard, 2), 1);  // and nothing before it
      EXPECT_EQ(heard[0], static_cast<char>(peer * 16 + rank));
    }
  }
}

TEST(Mesh, ARankAloneNeedsNobody) {
  const Result result = Connect(Group(1, std::chrono::seconds(20))[0]);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->size(), 1u);
}

// Returns the results of the other two of three ranks, while the victim only meets them. A victim
// that dies closes its listener; one that stops keeps it as long as the others are there.
std::vector<absl::Status> ConnectWithout(int victim, bool dies, milliseconds timeout) {
  absl::BlockingCounter others(2);
  const std::vector<MeshOptions> ranks = Group(3, timeout);
  std::vector<absl::Status> ends(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      if (rank == victim) {
        const absl::StatusOr<Listener> listener = TryToMeet(ranks[rank]);
        if (!dies) others.Wait();
        return;
      }
      ends[rank] = Connect(ranks[rank]).status();
      others.DecrementCount();
    });
  }
  for (std::thread& thread : threads) thread.join();
  ends.erase(ends.begin() + victim);
  return ends;
}

// A dead rank's address refuses connections, so any such rank is found without the timeout.
TEST(Mesh, ARankThatDiesBeforeItConnectsIsNamedByAllOthersAtOnce) {
  constexpr std::chrono::seconds kLong(60);
  for (int victim = 0; victim < 3; ++victim) {
    const auto begin = Clock::now();
    for (const absl::Status& end : ConnectWithout(victim, true, kLong)) {
      EXPECT_TRUE(absl::IsUnavailable(end)) << end;
      EXPECT_TRUE(absl::StrContains(end.message(), absl::StrCat("rank ", victim, " is gone")))
          << end;
    }
    EXPECT_LT(Clock::now() - begin, kLong);
  }
}

// A stopped rank does not answer. On an overloaded machine others may be late as well, so each
// further attempt has more time.
TEST(Mesh, ARankThatStopsBeforeItConnectsIsNamedByAllOthers) {
  std::vector<std::thread> groups;
  for (int victim = 0; victim < 3; ++victim) {
    groups.emplace_back([victim] {
      const auto is_right = [&](const absl::Status& end) {
        return absl::IsDeadlineExceeded(end) &&
               absl::StrContains(end.message(),
                                 absl::StrCat("rank ", victim, " did not connect in time"));
      };
      std::vector<absl::Status> ends;
      for (milliseconds timeout(500); timeout < std::chrono::seconds(60); timeout *= 4) {
        ends = ConnectWithout(victim, false, timeout);
        if (std::all_of(ends.begin(), ends.end(), is_right)) break;
      }
      for (const absl::Status& end : ends) EXPECT_TRUE(is_right(end)) << end;
    });
  }
  for (std::thread& group : groups) group.join();
}

// The packets by which a system reports a dead rank may be lost. Here the rank's listener is
// closed, but the silent connection to it stays open.
TEST(Mesh, ADeadRankIsFoundAlsoIfTheLineToItDoesNotBreak) {
  const std::vector<MeshOptions> ranks = Group(2, std::chrono::seconds(20));
  Result left;
  std::thread rank0([&] { left = Connect(ranks[0]); });
  Descriptor line;
  {
    absl::StatusOr<Listener> listener = OnlyMeet(ranks[1]);
    pollfd called{listener->fd(), POLLIN, 0};
    ASSERT_EQ(poll(&called, 1, 20000), 1);
    line = *listener->Accept();
  }
  rank0.join();
  EXPECT_TRUE(line.valid() && absl::IsUnavailable(left.status())) << left.status();
  EXPECT_NE(left.status().message().find("rank 1 is gone"), absl::string_view::npos)
      << left.status();
}

// The last of three ranks is late, and the other two are connected when one of them dies.
TEST(Mesh, AConnectedRankThatDiesIsNamedOnceNobodyElseIsAwaited) {
  const std::vector<MeshOptions> ranks = Group(3, std::chrono::seconds(20));
  Result left;
  absl::Notification has_died;
  std::thread rank0([&] { left = Connect(ranks[0]); });
  std::thread rank2([&] {
    const absl::StatusOr<Listener> listener = OnlyMeet(ranks[2]);
    has_died.WaitForNotification();
  });
  const absl::StatusOr<Listener> listener = Listener::Open(ranks[1].address);
  const absl::StatusOr<Meeting> meeting = Meet(ranks[1], "", listener->address());
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_TRUE(CallUntilConnected(0, ranks[1], *meeting)[0].valid());
  has_died.Notify();
  rank0.join();
  rank2.join();
  for (const char* gone : {"rank 1 is gone", "rank 2 is gone"}) {
    EXPECT_NE(left.status().message().find(gone), absl::string_view::npos) << left.status();
  }
}

TEST(Mesh, ARankThatNeverComesIsNamed) {
  for (const int rank : {0, 1}) {
    const Result result = Connect(Group(2, milliseconds(200))[rank]);
    EXPECT_TRUE(absl::IsDeadlineExceeded(result.status())) << result.status();
    const std::string named = "rank " + std::to_string(1 - rank) + " did not come; start it";
    EXPECT_NE(result.status().message().find(named), absl::string_view::npos) << result.status();
  }
}

// Rank 1 comes after four times as many strangers as may be half open at a time. If each were given
// its full five seconds, rank 1 would be too late.
TEST(Mesh, SilentStrangersNeitherKeepARankAwayNorFillTheProcess) {
  constexpr size_t kStrangers = 540;
  const std::vector<MeshOptions> ranks = Group(2, std::chrono::seconds(15));
  Result result;
  std::thread rank0([&] { result = Connect(ranks[0]); });
  // Rank 0 checks from time to time whether rank 1 is there.
  const absl::StatusOr<Listener> rank1 = Listener::Open(ranks[1].address);
  ASSERT_TRUE(rank1.ok()) << rank1.status();
  const absl::StatusOr<Meeting> meeting = Meet(ranks[1], "", rank1->address());
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  const Address& address = meeting->addresses[0];
  std::vector<Descriptor> strangers;
  const size_t before = Held::Now().descriptors;
  while (strangers.size() < kStrangers && Clock::now() < ranks[0].deadline) {
    Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(socket.fd(), address.get(), address.length) == 0) {
      strangers.push_back(std::move(socket));
    }
  }
  EXPECT_LT(Held::Now().descriptors, before + kStrangers + 200);
  EXPECT_TRUE(CallUntilConnected(0, ranks[1], *meeting)[0].valid());
  rank0.join();
  EXPECT_TRUE(result.ok()) << result.status();
}

class MeshKeys : public testing::Test {
 protected:
  std::string KeyFile(const std::string& name, const std::string& key) {
    const std::string path = folder_ + name;
    std::ofstream(path) << key;
    chmod(path.c_str(), 0600);
    return path;
  }
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static void ExpectAll(const std::vector<Result>& results, const std::string& words) {
    for (const Result& result : results) {
      EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << result.status();
      EXPECT_NE(result.status().message().find(words), absl::string_view::npos) << result.status();
    }
  }

  const std::string folder_ =
      std::filesystem::temp_directory_path() / ("thinwire_mesh_" + std::to_string(getpid()) + "/");
  std::vector<MeshOptions> ranks_ = Group(3, std::chrono::seconds(20));
};

TEST_F(MeshKeys, RanksWithOneKeyConnect) {
  for (MeshOptions& rank : ranks_) {
    rank.key_file = KeyFile(std::to_string(rank.rank), "0123456789abcdef");
  }
  for (const Result& result : ConnectAll(ranks_)) EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(MeshKeys, ARankWithAnotherKeyIsAMismatchOnEveryRank) {
  for (MeshOptions& rank : ranks_) {
    rank.key_file = KeyFile(std::to_string(rank.rank),
                            rank.rank == 1 ? "0123456789abcdeX" : "0123456789abcdef");
  }
  ExpectAll(ConnectAll(ranks_), "have key files with different keys; copy one file to every rank");
}

TEST_F(MeshKeys, ARankWithoutTheKeyIsAMismatchOnEveryRank) {
  for (const int with : {0, 1, 2}) {
    ranks_ = Group(3, std::chrono::seconds(20));
    ranks_[with].key_file = KeyFile("one", "0123456789abcdef");
    const std::vector<Result> results = ConnectAll(ranks_);
    ExpectAll(results, "rank " + std::to_string(with) + " has a key file, but rank ");
    ExpectAll(results, "set THINWIRE_KEY_FILE on every rank or on none");
  }
}

// The store does not show the difference, as if somebody had changed the options in it.
TEST(Mesh, RanksThatAreSetUpDifferentlyAreAMismatchOnBothSides) {
  std::vector<MeshOptions> ranks = Group(2, std::chrono::seconds(20));
  ranks[1].digest = "other";
  for (const Result& result : ConnectAll(ranks)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << result.status();
    EXPECT_NE(result.status().message().find("is set up in another way"), absl::string_view::npos);
  }
}

TEST(Mesh, WhatSomebodyElseWroteIntoTheStoreIsRefused) {
  for (const char* hello : {"", "x", "a b c", "127.0.0.1 99999999999 c", "1 2 3 4"}) {
    const std::vector<MeshOptions> ranks = Group(2, std::chrono::seconds(20));
    ASSERT_TRUE(ranks[0].store->Set("t/mesh/1", hello).ok());
    const Result result = Connect(ranks[0]);
    EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << hello << result.status();
  }
}

}  // namespace
}  // namespace thinwire
