// Members of a group with roles, and the group's epochs.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/join/handshake.h"
#include "transport/store.h"

namespace thinwire {
namespace {

constexpr Member kWorker{Role::kWorker}, kServer{Role::kServer};

TEST(Roster, NumbersTheMembersOfARoleByRank) {
  const absl::StatusOr<Roster> roster = Roster::Of(3, {kServer, kWorker, kServer, kWorker});
  ASSERT_TRUE(roster.ok()) << roster.status();
  EXPECT_EQ(roster->epoch(), 3u);
  EXPECT_EQ(roster->count(Role::kServer), 2);
  EXPECT_EQ(roster->RankOf(Role::kServer, 1), 2);
  EXPECT_EQ(roster->NameOf(3), "rank 3 (worker 1)");
}

TEST(Roster, TakesTheIndexesThatMembersHave) {
  const absl::StatusOr<Roster> roster =
      Roster::Of(0, {{Role::kWorker, 1}, {Role::kWorker, 0}, {Role::kServer, 0}});
  ASSERT_TRUE(roster.ok()) << roster.status();
  EXPECT_EQ(roster->RankOf(Role::kWorker, 0), 1);
  EXPECT_EQ(roster->NameOf(0), "rank 0 (worker 1)");
}

TEST(Roster, NamesWorkersByTheirRanksOnly) {
  EXPECT_EQ(Roster::Of(0, {kWorker, kWorker})->NameOf(1), "rank 1");
}

TEST(Roster, NamesWhoDoesNotFitIn) {
  const auto refused = [](std::vector<Member> members, const std::string& words) {
    const absl::Status status = Roster::Of(0, std::move(members)).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
  };
  refused({{Role::kServer, 0}, kWorker, {Role::kServer, 0}}, "rank 0 and rank 2 are both server 0");
  refused({{Role::kServer, 2}, {Role::kServer, 0}}, "rank 0 is server 2, expected 0 to 1");
  refused({{Role::kServer, 0}, kServer}, "rank 1 is a server without an index");
}

TEST(Roster, MembersTravelAsText) {
  for (const Member& member : {kWorker, kServer, Member{Role::kSite, 12}}) {
    const std::optional<Member> parsed = ParseMember(TextOf(member));
    ASSERT_TRUE(parsed.has_value()) << TextOf(member);
    EXPECT_EQ(parsed->role, member.role);
    EXPECT_EQ(parsed->index, member.index);
  }
  for (const char* text : {"", "boss", "worker:", "worker:-1", "worker:x", "server:1:2"}) {
    EXPECT_FALSE(ParseMember(text).has_value()) << text;
  }
}

struct Seat {
  Member member;
  uint64_t epoch = 0;
};

// Returns each rank's result of a handshake with these seats.
std::vector<absl::StatusOr<Roster>> Meet(const std::vector<Seat>& seats) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  const int size = static_cast<int>(seats.size());
  std::vector<absl::StatusOr<Roster>> rosters(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      rosters[rank] =
          Handshake(*store, "x/", rank, size, Options(), Clock::now() + std::chrono::seconds(60),
                    seats[rank].member, seats[rank].epoch);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return rosters;
}

TEST(Handshake, GivesEveryRankTheRoster) {
  for (const auto& roster : Meet({{kServer, 7}, {kWorker, 7}, {kWorker, 7}})) {
    ASSERT_TRUE(roster.ok()) << roster.status();
    EXPECT_EQ(roster->epoch(), 7u);
    EXPECT_EQ(roster->NameOf(0), "rank 0 (server 0)");
    EXPECT_EQ(roster->NameOf(2), "rank 2 (worker 1)");
  }
}

TEST(Handshake, NamesARankOfAnotherEpoch) {
  for (const auto& roster : Meet({{kWorker, 2}, {kWorker, 2}, {kWorker, 1}})) {
    EXPECT_TRUE(absl::IsFailedPrecondition(roster.status())) << roster.status();
    for (const char* word : {"rank 2", "epoch=1", "epoch=2"}) {
      EXPECT_TRUE(absl::StrContains(roster.status().message(), word)) << roster.status();
    }
  }
}

TEST(Handshake, NamesTwoMembersOfOneRoleAndIndexOnEveryRank) {
  const Member first{Role::kServer, 0};
  for (const auto& roster : Meet({{first, 0}, {kWorker, 0}, {first, 0}})) {
    EXPECT_TRUE(absl::IsFailedPrecondition(roster.status())) << roster.status();
    EXPECT_TRUE(absl::StrContains(roster.status().message(), "rank 0 and rank 2 are both server 0"))
        << roster.status();
  }
}

}  // namespace
}  // namespace thinwire
