// The challenge as messages: everything but the other end's exact proof is refused.
#include "transport/mesh/challenge.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "transport/mesh/group_key.h"

namespace thinwire {
namespace {

constexpr char kToken[] = "0123456789abcdef";

Identity Rank(int rank, const std::string& secret = "", const std::string& options = "same") {
  return {rank, 4, GroupKey(secret, kToken), HmacSha256("", options)};
}

// The four messages of a challenge between rank 2 and rank 1, as far as they were sent.
struct Talk {
  std::string hello, reply, proof, admission;
  absl::Status server, client;

  // Runs the challenge until it is complete or one end refuses.
  Talk(const Identity& client_rank, const Identity& server_rank) {
    Challenge caller = Challenge::AsClient(client_rank, server_rank.rank);
    Challenge door = Challenge::AsServer(server_rank);
    hello = caller.hello();
    server = door.Take(hello, &reply);
    if (reply.empty()) return;
    client = caller.Take(reply, &proof);
    if (!server.ok() || !client.ok()) return;
    server = door.Take(proof, &admission);
    client = caller.Take(admission, &nothing);
    if (server.ok() && client.ok()) {
      EXPECT_EQ(door.awaited(), 0u);
      EXPECT_EQ(caller.awaited(), 0u);
      EXPECT_EQ(door.peer(), client_rank.rank);
    }
  }

  std::string nothing;
};

// Returns a server's result for these messages, one after the other.
absl::Status ServerTakes(const Identity& self, const std::vector<std::string>& messages) {
  Challenge door = Challenge::AsServer(self);
  std::string answer;
  for (const std::string& message : messages) {
    if (absl::Status status = door.Take(message, &answer); !status.ok()) return status;
  }
  return absl::OkStatus();
}

TEST(Challenge, TwoRanksOfAGroupAreConvinced) {
  const Identity one = Rank(1), two = Rank(2);
  const Talk talk(two, one);
  EXPECT_TRUE(talk.server.ok()) << talk.server;
  EXPECT_TRUE(talk.client.ok()) << talk.client;
  EXPECT_TRUE(talk.nothing.empty());
}

TEST(Challenge, HmacIsThatOfRfc4231) {
  const std::string mac = HmacSha256("Jefe", "what do ya want for nothing?");
  ASSERT_EQ(mac.size(), kMacBytes);
  EXPECT_EQ(mac.substr(0, 4), "\x5b\xdc\xc1\x46");
  EXPECT_EQ(mac.substr(28), "\x64\xec\x38\x43");
}

TEST(Challenge, AnotherKeyIsRefusedByBothEnds) {
  const Identity one = Rank(1, "a secret of the group"), two = Rank(2, "another secret there");
  EXPECT_TRUE(absl::IsPermissionDenied(Talk(two, one).server));
  // A server with another key can't give the right answer, even if it admits everybody.
  const Identity same = Rank(2, "a secret of the group");
  Challenge caller = Challenge::AsClient(same, 1);
  const std::string reply = Talk(two, Rank(1, "another secret there")).reply;
  std::string answer;
  EXPECT_TRUE(absl::IsPermissionDenied(caller.Take(reply, &answer)));
  EXPECT_TRUE(answer.empty());
}

TEST(Challenge, AnotherTokenIsAnotherKey) {
  Identity one = Rank(1), two = Rank(2);
  two.key = GroupKey("", "fedcba9876543210");
  EXPECT_TRUE(absl::IsPermissionDenied(Talk(two, one).server));
  EXPECT_NE(one.key.fingerprint(), two.key.fingerprint());
}

TEST(Challenge, ARecordedConnectionProvesNothing) {
  const Identity one = Rank(1), two = Rank(2);
  const Talk recorded(two, one);
  EXPECT_TRUE(ServerTakes(one, {recorded.hello}).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {recorded.hello, recorded.proof})));
  Challenge caller = Challenge::AsClient(two, 1);
  std::string answer;
  EXPECT_TRUE(absl::IsPermissionDenied(caller.Take(recorded.reply, &answer)));
}

TEST(Challenge, AMessageThatComesBackIsRefused) {
  const Identity one = Rank(1), two = Rank(2);
  Challenge caller = Challenge::AsClient(two, 1);
  std::string answer;
  EXPECT_TRUE(absl::IsPermissionDenied(caller.Take(caller.hello(), &answer)));
  const Talk talk(two, one);
  EXPECT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {talk.reply})));
  EXPECT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {talk.hello, talk.admission})));
}

TEST(Challenge, OnlyAHigherRankOfTheGroupMayCall) {
  const Identity one = Rank(1);
  for (const int from : {0, 1, 4, 9, -1}) {
    const Identity other = Rank(from);
    const Challenge caller = Challenge::AsClient(other, 1);
    EXPECT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {caller.hello()}))) << from;
  }
  const Identity two = Rank(2);
  for (const int to : {0, 2, 3, -1}) {  // a call for another rank
    const Challenge caller = Challenge::AsClient(two, to);
    EXPECT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {caller.hello()}))) << to;
  }
}

TEST(Challenge, AnotherSetUpIsAMismatchThatBothEndsHearOf) {
  const Identity one = Rank(1), two = Rank(2, "", "other options");
  const Talk talk(two, one);
  for (const absl::Status& status : {talk.server, talk.client}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_NE(status.message().find("is set up in another way than rank"), std::string::npos);
  }
}

TEST(Challenge, AMessageOfAnotherLengthIsRefused) {
  const Identity one = Rank(1), two = Rank(2);
  const Talk talk(two, one);
  for (size_t length = 0; length < talk.hello.size(); ++length) {
    EXPECT_FALSE(ServerTakes(one, {talk.hello.substr(0, length)}).ok()) << length;
  }
  EXPECT_FALSE(ServerTakes(one, {talk.hello + "x"}).ok());
  EXPECT_FALSE(ServerTakes(one, {talk.hello + talk.hello}).ok());
  EXPECT_FALSE(ServerTakes(one, {talk.hello, ""}).ok());
  Challenge caller = Challenge::AsClient(two, 1);
  std::string answer;
  EXPECT_FALSE(caller.Take(talk.reply + "x", &answer).ok());
}

// A change of any bit of any message is noticed.
TEST(Challenge, ABitMoreOrLessIsRefused) {
  const Identity one = Rank(1), two = Rank(2);
  std::string answer, ignored;
  for (int message = 0; message < 4; ++message) {
    const size_t bits = 8 * (message < 2 ? 112 : 40);
    for (size_t bit = 0; bit < bits; ++bit) {
      Challenge caller = Challenge::AsClient(two, 1), door = Challenge::AsServer(one);
      const auto damage = [bit](std::string text) {
        text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
        return text;
      };
      std::string text = caller.hello();
      Challenge* const ends[] = {&door, &caller};
      for (int i = 0; i < message; ++i) {
        ASSERT_TRUE(ends[i % 2]->Take(std::exchange(text, ""), &answer).ok());
        text = answer;
      }
      ASSERT_TRUE(absl::IsPermissionDenied(ends[message % 2]->Take(damage(text), &ignored)))
          << "message " << message << ", bit " << bit;
    }
  }
}

TEST(Challenge, RandomMessagesAreRefused) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const Identity one = Rank(1), two = Rank(2);
  const Talk talk(two, one);
  std::string answer;
  for (int i = 0; i < 20000; ++i) {
    std::string message(i % 3 == 0 ? random() % 300 : 112, '\0');
    for (char& c : message) c = static_cast<char>(random());
    if (i % 2 == 0 && message.size() >= 8) message.replace(0, 8, talk.hello, 0, 8);
    ASSERT_TRUE(absl::IsPermissionDenied(ServerTakes(one, {message})));
  }
}

}  // namespace
}  // namespace thinwire
