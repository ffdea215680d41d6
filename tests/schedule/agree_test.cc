// The messages by which ranks agree on a data plane, and how a rank that dies or stops is found.
#include "schedule/join/agree.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/join/planes.h"
#include "tests/transport/connect_gloo.h"
#include "transport/combined/combined.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kTimeout(60);

Board BoardOf(Transport& transport, Clock::duration patience = kTimeout) {
  return {"tea", transport.members(), transport, 0, Clock::now() + patience, kTimeout};
}

// Returns the board of this rank's node, which has two ranks.
Board NodeBoardOf(Transport& transport, Clock::duration patience = kTimeout) {
  const int rank = transport.members().rank, first = rank - rank % 2;
  return {"tea", {rank - first, 2}, transport, first, Clock::now() + patience, kTimeout};
}

// Repeats `attempt` until its status contains `words`, and returns its last status. On an
// overloaded machine other ranks may be late as well, so each further attempt has more time.
absl::Status Expecting(const std::string& words,
                       const std::function<absl::Status(Clock::duration)>& attempt) {
  absl::Status status;
  for (Clock::duration patience = milliseconds(200); patience < seconds(60); patience *= 4) {
    status = attempt(patience);
    if (absl::StrContains(status.message(), words)) break;
  }
  return status;
}

// Calls body(rank) on one thread per rank.
void OnRanks(int world, const std::function<void(int)>& body) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.emplace_back([&, rank] { body(rank); });
  for (std::thread& rank : ranks) rank.join();
}

TEST(Board, EverybodyHearsEverybody) {
  std::vector<Transport> transports = MakeInProcessTransports(3);
  const std::string all_bytes("a\0b\xff", 4), longest(kMostAnswerBytes, 'x');
  OnRanks(3, [&](int rank) {
    const Board board = BoardOf(transports[rank]);
    const std::vector<absl::StatusOr<std::string>> answers = {all_bytes, longest,
                                                              absl::NotFoundError("no cup")};
    for (const char* topic : {"first", "second"}) {
      const absl::StatusOr<Answers> heard = TellAll(board, topic, answers[rank]);
      ASSERT_TRUE(heard.ok()) << heard.status();
      EXPECT_EQ(*(*heard)[0], all_bytes);
      EXPECT_EQ(*(*heard)[1], longest);
      EXPECT_EQ(FirstRefusal(board, *heard).message(), "rank 2 takes no part over tea: no cup");
    }
    const absl::StatusOr<Answers> too_long =
        TellAll(board, "long", std::string(kMostAnswerBytes + 1, 'x'));
    ASSERT_TRUE(too_long.ok()) << too_long.status();
    EXPECT_TRUE(absl::StrContains((*too_long)[1].status().message(), "4081 bytes"));
  });
}

// Two nodes of two ranks, which use the same topic.
TEST(Board, NeighboursAgreeAmongThemselves) {
  std::vector<Transport> transports = MakeInProcessTransports(4);
  OnRanks(4, [&](int rank) {
    const Board board = NodeBoardOf(transports[rank]);
    const int first = board.first;
    const absl::StatusOr<Answers> heard = TellAll(board, "topic", std::to_string(rank));
    ASSERT_TRUE(heard.ok()) << heard.status();
    EXPECT_EQ(*(*heard)[0], std::to_string(first));
    EXPECT_EQ(*(*heard)[1], std::to_string(first + 1));
    const absl::Status refusal = FirstRefusal(board, {"", absl::NotFoundError("no cup")});
    EXPECT_TRUE(absl::StrContains(refusal.message(), "rank " + std::to_string(first + 1)))
        << refusal;
  });
}

// If a rank waited for the deadline instead, its error would say that the deadline has passed.
TEST(GlooBoard, ARankThatDiesIsALostPeerWhateverIsChosen) {
  for (const TransportKind kind :
       {TransportKind::kUcx, TransportKind::kNccl, TransportKind::kAuto}) {
    std::vector<Transport> transports = ConnectGlooRanks(2);
    std::thread dying([&] { transports[1].Reset(); });
    const absl::Status status =
        ChooseDataPlane({.kind = kind, .deadline = Clock::now() + kTimeout, .timeout = kTimeout},
                        transports[0])
            .status();
    dying.join();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 is gone")) << status;
  }
}

TEST(GlooBoard, RanksThatStayAwayAreNamed) {
  const std::string words =
      "rank 0 could not tell all others its tea (topic) in time: ranks 1, 3 did not answer";
  const absl::Status status = Expecting(words, [](Clock::duration patience) {
    std::vector<Transport> transports = ConnectGlooRanks(4);
    const auto tell = [&](int rank) {
      return TellAll(BoardOf(transports[rank], patience), "topic", "here").status();
    };
    std::thread other([&] { EXPECT_TRUE(absl::IsDeadlineExceeded(tell(2))); });
    const absl::Status told = tell(0);
    other.join();
    return told;
  });
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
}

// Rank 0 has stopped. Rank 2 waits for it, and rank 3, which is on another board, for rank 2.
TEST(GlooBoard, ARankThatWaitsItselfIsNotTakenForTheOneThatStopped) {
  std::vector<absl::Status> ends(4);
  const std::string words = " in time: rank 0 did not answer";
  Expecting(words, [&](Clock::duration patience) {
    std::vector<Transport> transports = ConnectGlooRanks(4);
    OnRanks(4, [&](int rank) {
      if (rank == 0) return;
      const Board board =
          rank == 2 ? BoardOf(transports[rank], patience) : NodeBoardOf(transports[rank], patience);
      ends[rank] = TellAll(board, "topic", "here").status();
    });
    const auto is_wrong = [&](int rank) { return !absl::StrContains(ends[rank].message(), words); };
    return ends[is_wrong(1) ? 1 : is_wrong(2) ? 2 : 3];
  }).IgnoreError();
  for (const int rank : {1, 2, 3}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(ends[rank])) << ends[rank];
    EXPECT_TRUE(absl::StrContains(ends[rank].message(), words)) << ends[rank];
  }
}

// The rank that times out first closes its connections. It sends its reason before that, so that a
// rank that sees only closed connections can report the reason to its caller.
TEST(GlooBoard, TheReasonOfWhoGaveUpFirstIsEverybodys) {
  std::vector<absl::Status> failures(2);
  const std::string words =
      "rank 0 could not tell all others its tea (topic) in time: rank 2 did not answer";
  Expecting(words, [&](Clock::duration first_patience) {
    std::vector<Transport> transports = ConnectGlooRanks(3);
    OnRanks(2, [&](int rank) {
      const Clock::duration patience = rank == 0 ? first_patience : seconds(60);
      const absl::Status failure =
          TellAll(BoardOf(transports[rank], patience), "topic", "here").status();
      failures[rank] = GiveUp(transports[rank], failure);
    });
    const bool first_is_right = absl::StrContains(failures[0].message(), words);
    return first_is_right ? failures[1] : failures[0];
  }).IgnoreError();
  for (const absl::Status& failure : failures) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(failure)) << failure;
    EXPECT_TRUE(absl::StrContains(failure.message(), words)) << failure;
  }
}

TEST(Board, AllTakeTheEarliestDeadline) {
  const Deadline begin = Clock::now();
  std::vector<Transport> transports = MakeInProcessTransports(3);
  OnRanks(3, [&](int rank) {
    const Board board = BoardOf(transports[rank], seconds(rank == 1 ? 30 : 60));
    const absl::StatusOr<Deadline> earliest = EarliestDeadline(board);
    ASSERT_TRUE(earliest.ok()) << earliest.status();
    EXPECT_LE(*earliest, Clock::now() + seconds(30));
    EXPECT_GT(*earliest, begin);
    if (rank == 1) {
      EXPECT_LE(*earliest, board.deadline);
    }
  });
}

TEST(Board, AnOutcomeIsEverybodys) {
  std::vector<Transport> transports = MakeInProcessTransports(2);
  OnRanks(2, [&](int rank) {
    const Board board = BoardOf(transports[rank]);
    EXPECT_TRUE(TellOutcome(board, "fine", absl::OkStatus()).ok());
    const absl::Status mine = rank == 1 ? absl::UnimplementedError("no cup") : absl::OkStatus();
    const absl::Status status = TellOutcome(board, "broken", mine);
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_EQ(status.message(), "rank 1 takes no part over tea: no cup");
  });
}

// A rank that continued to ask would get no answers, and would blame all other ranks.
TEST(GlooBoard, AFailureThatCannotBeToldIsNotBlamedOnTheOthers) {
  std::vector<Transport> transports = ConnectGlooRanks(3);
  const Board board = BoardOf(transports[0]);
  const absl::Status mine = absl::DeadlineExceededError("rank 2 is late");
  transports[0].control->Abort(absl::DeadlineExceededError("the deadline has passed"));
  EXPECT_EQ(TellOutcome(board, "outcome", mine), mine);
  const Board over = BoardOf(transports[1], seconds(-1));
  EXPECT_EQ(TellOutcome(over, "outcome", mine), mine);
}

// The topic decides which plane an answer uses; the deadline ends the wait on every plane.
TEST(Board, WhoIsLateIsNamedWhereAnswersGoByPlanesOfTheirOwn) {
  for (const std::string topic : {"black", "green", "white", "yellow", "oolong", "mint"}) {
    std::vector<Transport> transports = MakeInProcessTransports(2),
                           others = MakeInProcessTransports(2);
    std::vector<Transport> second;
    second.push_back(std::move(others[0]));
    Transport& mine = transports[0];
    mine.data = std::make_unique<Spread>(std::move(mine.data), std::move(second));
    const absl::Status status = TellAll(BoardOf(mine, milliseconds(50)), topic, "here").status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "in time: rank 1 did not answer")) << status;
  }
}

}  // namespace
}  // namespace thinwire
