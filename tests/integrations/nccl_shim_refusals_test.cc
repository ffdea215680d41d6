// If ranks can't compress or don't agree, all of them say why and continue uncompressed.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>

#include "absl/strings/match.h"
#include "integrations/nccl_shim/nccl_meeting.h"
#include "tests/integrations/nccl_shim_ranks.h"

namespace thinwire {
namespace {

// Expects all ranks to continue uncompressed, and each of `sayers` to say `words`.
void ExpectRefusal(Ranks& ranks, const std::vector<std::string>& words,
                   const std::vector<int>& sayers) {
  const int world = static_cast<int>(ranks.size());
  OnRanks(ranks, [&](int r) {
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(ranks[r]->Sum(ValuesOf(r)), ExactSum(world)) << "rank " << r;
      EXPECT_EQ(ranks[r]->result, kNcclOk);
    }
  });
  for (const int r : sayers) {
    for (const std::string& word : words) {
      EXPECT_TRUE(absl::StrContains(ranks[r]->said(), word)) << word << " in " << ranks[r]->said();
    }
  }
}

TEST_F(NcclShimTest, RanksThatDisagreeAllSaySo) {
  Ranks codecs = RanksWith(3, [](int r) { return OptedIn(r == 2 ? "int4" : "int8"); });
  ExpectRefusal(codecs, {"MismatchError", "rank 2 wants int4", "expected rank 0's int8", "alike"},
                {0, 1, 2});
  Ranks sizes = RanksWith(2, [](int r) {
    Environment environment = OptedIn();
    if (r == 1) environment["THINWIRE_NCCL_MIN_BYTES"] = "2048";
    return environment;
  });
  ExpectRefusal(sizes, {"MismatchError", "rank 1 wants int8 from 2048 bytes", "1024 bytes"},
                {0, 1});
  Ranks collectives = RanksWith(2, [](int r) {
    Environment environment = OptedIn();
    if (r == 1) environment["THINWIRE_NCCL_REDUCE_SCATTER"] = "1";
    return environment;
  });
  ExpectRefusal(collectives, {"MismatchError", "rank 1 wants", "reduce-scatters"}, {0, 1});
}

TEST_F(NcclShimTest, AWrongSettingOfOneRankIsHeardByAll) {
  for (const auto& [codec, word] :
       std::map<std::string, std::string>{{"int9", "unknown codec 'int9'"},
                                          {"topk:density=0.1", "does not carry"},
                                          {"adaptive", "does not carry"},
                                          {"onebit", "diverges without momentum"}}) {
    Ranks ranks = RanksWith(2, [&](int r) { return OptedIn(r == 1 ? codec : "int8"); });
    ExpectRefusal(ranks, {"UnavailableError", "rank 1 takes no part", word, "uncompressed"},
                  {0, 1});
  }
}

// A rank without the shim can tell nobody, so the others wait for it, until their deadline.
TEST_F(NcclShimTest, ARankWithoutTheShimIsADeadline) {
  Ranks ranks = RanksWith(3, [](int r) {
    if (r == 1) return Environment();
    Environment environment = OptedIn();
    environment["THINWIRE_TIMEOUT_S"] = "0.2";
    return environment;
  });
  ExpectRefusal(ranks, {"TimeoutError", "not all ranks came in time", "LD_PRELOAD"}, {0, 2});
  EXPECT_EQ(ranks[1]->said(), "");
}

TEST_F(NcclShimTest, AnIdOfAProcessThatHasNotOptedInIsSaid) {
  Ranks ranks = RanksWith(2, [](int r) { return r == 0 ? Environment() : OptedIn(); });
  ExpectRefusal(ranks, {"rank 1 of 2", "has not opted in"}, {1});
}

TEST_F(NcclShimTest, ARankWhoseDeviceCantBeUsedSaysSo) {
  Ranks ranks = RanksWith(2, [](int) {
    Environment environment = OptedIn();
    environment["THINWIRE_TIMEOUT_S"] = "0.2";
    return environment;
  });
  ranks[0]->open_device = [](int) { return absl::UnimplementedError("no device of that number"); };
  ExpectRefusal(ranks, {"rank 0 takes no part: no device of that number"}, {0, 1});
}

TEST_F(NcclShimTest, ARankWithoutMemorySaysSo) {
  Ranks ranks = RanksWithCodec(2, "int8");
  ranks[1]->open_device = [](int ordinal) {
    static const kernels::DeviceApi api = [] {
      kernels::DeviceApi poor = WatchedDevices::Api();
      poor.allocate = [](int, size_t, void**) { return 2; };
      return poor;
    }();
    return MakeDevice(api, ordinal, "host:" + std::to_string(ordinal));
  };
  ExpectRefusal(ranks, {"rank 1 takes no part", "memory"}, {0, 1});
}

TEST_F(NcclShimTest, IdsThatNobodyCanMeetByAreSaid) {
  const FakeBehaves behaving(&FakeNccl::long_id, 1);
  Ranks ranks = RanksWithCodec(2, "int8");
  EXPECT_FALSE(MeetingOf(NewId(*ranks[0])).has_value());
  EXPECT_TRUE(absl::StrContains(ranks[0]->said(), "other unique ids")) << ranks[0]->said();

  Ranks fixed = RanksWith(2, [](int) {
    Environment environment = OptedIn();
    environment["NCCL_COMM_ID"] = "127.0.0.1:1234";
    return environment;
  });
  EXPECT_FALSE(MeetingOf(NewId(*fixed[0])).has_value());
  EXPECT_TRUE(absl::StrContains(fixed[0]->said(), "unset it")) << fixed[0]->said();
}

NcclUniqueId MadeByNccl() {
  NcclUniqueId id = {};
  const Address loopback = *Address::Of("127.0.0.1", 1);
  std::memcpy(id.bytes + 8, &loopback.storage, loopback.length);
  return id;
}

constexpr std::chrono::milliseconds kLong{60000};

std::vector<absl::StatusOr<std::vector<std::string>>> Meet(const MeetingPlace& meeting, int size,
                                                           int absent,
                                                           std::chrono::milliseconds wait) {
  std::vector<absl::StatusOr<std::vector<std::string>>> heard(size);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    if (r == absent) continue;
    threads.emplace_back([&, r] {
      heard[r] = TellAllAt(meeting, {r, size}, 0, "rank " + std::to_string(r), wait);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return heard;
}

TEST(NcclMeetingTest, AllHearTheSameAndLateOnesToo) {
  MeetingHost host;
  NcclUniqueId id = MadeByNccl(), other = MadeByNccl();
  ASSERT_TRUE(host.Invite(&id).ok());
  ASSERT_TRUE(host.Invite(&other).ok());
  const std::vector<std::string> all = {"rank 0", "rank 1", "rank 2"};
  for (const auto& heard : Meet(*MeetingOf(id), 3, -1, kLong)) EXPECT_EQ(*heard, all);

  const auto heard = Meet(*MeetingOf(other), 3, 1, std::chrono::seconds(2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(heard[0].status())) << heard[0].status();
  EXPECT_TRUE(absl::StrContains(heard[0].status().message(), "rank 1 for one"));
  EXPECT_EQ(heard[2].status(), heard[0].status());
  EXPECT_EQ(
      TellAllAt(*MeetingOf(other), {1, 3}, 0, "late", std::chrono::milliseconds(100)).status(),
      heard[0].status());
}

// A rank with a shorter timeout does not continue alone: the round ends for all.
TEST(NcclMeetingTest, TheFirstDeadlineIsThatOfAll) {
  MeetingHost host;
  NcclUniqueId id = MadeByNccl();
  ASSERT_TRUE(host.Invite(&id).ok());
  const MeetingPlace meeting = *MeetingOf(id);
  absl::Status patient;
  std::thread first([&] { patient = TellAllAt(meeting, {0, 3}, 0, "first", kLong).status(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto start = Clock::now();
  const absl::Status brief =
      TellAllAt(meeting, {1, 3}, 0, "second", std::chrono::milliseconds(100)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(brief)) << brief;
  first.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(patient)) << patient;
  EXPECT_LT(Clock::now() - start, kLong / 2) << "it has waited for its own time";
}

// Strangers that connect and say nothing or something wrong, or that leave, change nothing.
TEST(NcclMeetingTest, StrangersChangeNothing) {
  MeetingHost host;
  NcclUniqueId id = MadeByNccl();
  ASSERT_TRUE(host.Invite(&id).ok());
  const MeetingPlace meeting = *MeetingOf(id);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 40; ++i) {
    strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(strangers.back().fd(), meeting.address.get(), meeting.address.length), 0);
    const std::string garbage(static_cast<size_t>(40 * i), static_cast<char>(i));
    if (i % 3 != 0) send(strangers.back().fd(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    if (i % 3 == 1) strangers.pop_back();
  }
  const MeetingPlace wrong{meeting.address, std::string(16, 'x')};
  EXPECT_TRUE(absl::IsUnavailable(TellAllAt(wrong, {0, 2}, 0, "", kLong).status()));
  EXPECT_TRUE(absl::IsUnavailable(TellAllAt(meeting, {5, 2}, 0, "", kLong).status()));
  const std::vector<std::string> all = {"rank 0", "rank 1"};
  for (const auto& heard : Meet(meeting, 2, -1, kLong)) EXPECT_EQ(*heard, all);
}

TEST(NcclMeetingTest, AHostThatEndsSendsItsGuestsAway) {
  auto host = std::make_unique<MeetingHost>();
  NcclUniqueId id = MadeByNccl();
  ASSERT_TRUE(host->Invite(&id).ok());
  const MeetingPlace meeting = *MeetingOf(id);
  std::thread guest([&] {
    EXPECT_TRUE(absl::IsUnavailable(TellAllAt(meeting, {0, 2}, 0, "", kLong).status()));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  host.reset();
  guest.join();
  EXPECT_TRUE(absl::IsUnavailable(TellAllAt(meeting, {0, 2}, 0, "", kLong).status()));
}

TEST(NcclShimSettingsTest, WrongNumbersAreRefusals) {
  const auto refusal = [](const Environment& environment) {
    return ReadNcclShimSettings([&](const char* name) -> const char* {
             const auto found = environment.find(name);
             return found == environment.end() ? nullptr : found->second.c_str();
           })
        .refusal.ToString();
  };
  EXPECT_EQ(refusal(OptedIn()), "OK");
  for (const char* name : {"THINWIRE_NCCL_MIN_BYTES", "THINWIRE_NCCL_RANKS",
                           "THINWIRE_NCCL_FEEDBACK_BYTES", "THINWIRE_TIMEOUT_S"}) {
    Environment environment = OptedIn();
    environment[name] = "many";
    EXPECT_TRUE(absl::StrContains(refusal(environment), std::string(name) + " is 'many'"))
        << refusal(environment);
  }
}

}  // namespace
}  // namespace thinwire
