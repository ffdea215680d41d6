// Ranks that can't compress, or do not agree: all of them say why, and go on uncompressed.
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "integrations/nccl_shim/nccl_twin_id.h"
#include "tests/integrations/nccl_shim_ranks.h"

namespace thinwire {
namespace {

// All ranks go on uncompressed, and say `words`, the same on all of `sayers`.
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

// It can tell nobody, so the others wait for it, and no longer than their deadline.
TEST_F(NcclShimTest, ARankWithoutTheShimIsADeadline) {
  Ranks ranks = RanksWith(3, [](int r) {
    if (r == 1) return Environment();
    Environment environment = OptedIn();
    environment["THINWIRE_TIMEOUT_S"] = "0.2";
    return environment;
  });
  ExpectRefusal(ranks, {"TimeoutError", "not all ranks came within", "LD_PRELOAD"}, {0, 2});
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
  ExpectRefusal(ranks, {"no device of that number"}, {0});
  EXPECT_TRUE(absl::StrContains(ranks[1]->said(), "not all ranks came")) << ranks[1]->said();
}

TEST_F(NcclShimTest, IdsWithoutRoomForASecondOneAreSaid) {
  const auto expect = [](std::atomic<int> FakeNccl::*how, const char* word) {
    const FakeBehaves behaving(how, 1);
    Ranks ranks = RanksWithCodec(2, "int8");
    EXPECT_EQ(TwinOf(NewId(*ranks[0])), std::nullopt);
    EXPECT_TRUE(absl::StrContains(ranks[0]->said(), word)) << ranks[0]->said();
  };
  expect(&FakeNccl::long_id, "longer unique ids");
  expect(&FakeNccl::same_id, "NCCL_COMM_ID");
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
