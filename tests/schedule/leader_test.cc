// The leader's book: what may start, in which order, and the diagnosis if something never does.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "schedule/containers.h"
#include "schedule/order/sequencer.h"
#include "schedule/order/start_queue.h"

namespace thinwire {
namespace {

Report Of(uint64_t key, uint64_t numel = 1024, uint32_t chunks = 1) {
  Report report;
  report.key = key;
  report.numel = numel;
  report.chunks = chunks;
  SetName("t" + std::to_string(key), {}, &report);
  return report;
}

std::vector<Announcement> Next(Leader& leader) {
  std::vector<Announcement> order;
  leader.Next(&order);
  return order;
}

TEST(Leader, AnnouncesOnlyWhatAllRanksHaveReported) {
  Leader leader(3, Policy::kWfbp, 1 << 20);
  EXPECT_TRUE(leader.OnReport(0, Of(1)).ok());
  EXPECT_TRUE(leader.OnReport(2, Of(1)).ok());
  EXPECT_TRUE(leader.OnReport(2, Of(1)).ok());  // a repeated report does not count twice
  EXPECT_TRUE(Next(leader).empty());
  EXPECT_TRUE(leader.OnReport(1, Of(1)).ok());
  ASSERT_EQ(Next(leader).size(), 1u);
  EXPECT_TRUE(Next(leader).empty());
}

TEST(Leader, FifoGoesBySubmissionAndWfbpByReadiness) {
  for (const Policy policy : {Policy::kFifo, Policy::kWfbp}) {
    Leader leader(2, policy, 1 << 20);
    EXPECT_TRUE(leader.OnReport(0, Of(1)).ok());
    EXPECT_TRUE(leader.OnReport(0, Of(2)).ok());
    EXPECT_TRUE(leader.OnReport(1, Of(2)).ok());
    EXPECT_TRUE(leader.OnReport(1, Of(1)).ok());
    const std::vector<Announcement> order = Next(leader);
    ASSERT_EQ(order.size(), 2u);
    EXPECT_EQ(order[0].id, Of(policy == Policy::kFifo ? 1 : 2).id());
  }
}

// A chunk that does not drain finishes only after the next one has started, so no window may hold
// the next one back, even if it overtakes and is larger than all before.
TEST(Leader, AChunkThatWaitsForAFollowerGetsOneHoweverLarge) {
  Leader leader(1, Policy::kP3, 8192);
  EXPECT_TRUE(leader.OnReport(0, Of(1)).ok());
  EXPECT_EQ(Next(leader).size(), 1u);
  EXPECT_TRUE(leader.OnReport(0, Of(2)).ok());
  EXPECT_TRUE(leader.OnReport(0, Of(3)).ok());
  const std::vector<Announcement> second = Next(leader);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].drain, 0u);
  Report urgent = Of(4, 4096);
  urgent.priority = -1;
  EXPECT_TRUE(leader.OnReport(0, urgent).ok());
  EXPECT_TRUE(Next(leader).empty());
  leader.OnChunkDone(Of(1).id(), false);
  const std::vector<Announcement> third = Next(leader);
  ASSERT_EQ(third.size(), 1u);
  EXPECT_EQ(third[0].id, urgent.id());
}

TEST(Leader, P3GoesByPriorityAndOvertakesAtChunkBorders) {
  Leader leader(1, Policy::kP3, 4096);
  Report late = Of(1, 4 * 1024, 4), early = Of(2), same = Of(3);
  late.priority = 9;
  early.priority = same.priority = -1;
  EXPECT_TRUE(leader.OnReport(0, late).ok());
  EXPECT_EQ(Next(leader).at(0).id, late.id());
  EXPECT_TRUE(leader.OnReport(0, early).ok());
  EXPECT_TRUE(leader.OnReport(0, same).ok());
  // The window has room for one chunk: as each ends, the first one by priority follows.
  uint64_t running = late.id();
  for (const uint64_t next : {early.id(), same.id(), late.id(), late.id(), late.id()}) {
    EXPECT_TRUE(Next(leader).empty());
    leader.OnChunkDone(running, false);
    const std::vector<Announcement> order = Next(leader);
    ASSERT_EQ(order.size(), 1u);
    ASSERT_EQ(order[0].id, next);
    running = next;
  }
}

TEST(Leader, KeepsTheWindowAndAlwaysOneChunk) {
  Leader leader(1, Policy::kFifo, 2 * 4096);
  EXPECT_TRUE(leader.OnReport(0, Of(1, 4 * 1024, 4)).ok());
  EXPECT_EQ(Next(leader).size(), 2u);
  leader.OnChunkDone(Of(1).id(), false);
  EXPECT_EQ(Next(leader).size(), 1u);
  Leader narrow(1, Policy::kFifo, 1);
  EXPECT_TRUE(narrow.OnReport(0, Of(1)).ok());
  EXPECT_EQ(Next(narrow).size(), 1u);
}

TEST(Leader, DisagreementNamesBothRanksAndBothSizes) {
  Leader leader(2, Policy::kFifo, 1 << 20);
  EXPECT_TRUE(leader.OnReport(0, Of(1, 1024)).ok());
  const absl::Status status = leader.OnReport(1, Of(1, 1025));
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  for (const char* word : {"'t1'", "rank 0", "rank 1", "1024", "1025"}) {
    EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << ": " << status;
  }
}

TEST(Leader, DiagnosesTheMissingAndTheSilent) {
  Leader leader(3, Policy::kFifo, 1 << 20);
  EXPECT_TRUE(leader.OnReport(0, Of(1)).ok());
  EXPECT_TRUE(leader.OnReport(1, Of(1)).ok());
  EXPECT_TRUE(leader.OnReport(2, Of(7)).ok());
  const absl::Status missing = leader.Diagnose(Of(1).id(), {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(missing));
  EXPECT_NE(missing.message().find("rank 2 never submitted"), absl::string_view::npos) << missing;
  EXPECT_NE(missing.message().find("'t7'"), absl::string_view::npos) << missing;
  const absl::Status stopped = leader.Diagnose(Of(1).id(), {2});
  EXPECT_NE(stopped.message().find("no answer comes"), absl::string_view::npos) << stopped;
  EXPECT_TRUE(leader.OnReport(2, Of(1)).ok());
  const absl::Status silent = leader.Diagnose(Of(1).id(), {2});
  EXPECT_NE(silent.message().find("rank 2 submitted it and then fell silent"),
            absl::string_view::npos)
      << silent;
}

// The predicted tensor's chunks hold the lanes that the overdue tensor needs.
TEST(Leader, DiagnosesThePredictedTensorThatHoldsUpAnother) {
  Leader leader(2, Policy::kFifo, 1 << 20);
  leader.Expect(Of(1));
  leader.Expect(Of(2));
  leader.Expect(Of(3));
  EXPECT_TRUE(leader.OnReport(0, Of(1)).ok());
  EXPECT_TRUE(leader.OnReport(0, Of(3)).ok());
  EXPECT_TRUE(leader.OnReport(1, Of(3)).ok());
  EXPECT_TRUE(Next(leader).empty()) << "predicted tensors are not announced";
  const absl::Status status = leader.Diagnose(Of(3).id(), {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  for (const char* word : {"'t1'", "predicted", "holds up 't3'", "rank 1 never submitted",
                           "submit it before you wait for 't3'", "(planned)"}) {
    EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << ": " << status;
  }
  EXPECT_STREQ(leader.Unreported(0)->name, "t2");
}

// Only a chunk that is sure to be followed by another may run later hops after that one's first.
TEST(Leader, DrainsWhatNothingSurelyFollows) {
  Leader leader(1, Policy::kFifo, 2 * 4096);
  EXPECT_TRUE(leader.OnReport(0, Of(1, 3 * 1024, 3)).ok());
  std::vector<Announcement> order = Next(leader);
  ASSERT_EQ(order.size(), 2u);
  EXPECT_EQ(order[0].drain, 0u);
  EXPECT_EQ(order[1].drain, 0u);
  leader.OnChunkDone(Of(1).id(), false);
  order = Next(leader);
  ASSERT_EQ(order.size(), 1u);
  EXPECT_EQ(order[0].drain, 1u);
  Leader narrow(1, Policy::kFifo, 4096);
  EXPECT_TRUE(narrow.OnReport(0, Of(1, 3 * 1024, 3)).ok());
  EXPECT_EQ(Next(narrow).at(0).drain, 1u) << "the window lets the next one wait for this one's end";
}

TEST(Policy, GoesByPriorityThenByWhoWasCompleteFirst) {
  const Place early{1, 9, 5}, urgent{2, 8, 1}, ready{3, 7, 5};
  EXPECT_TRUE(GoesBefore(Policy::kFifo, early, urgent));
  EXPECT_TRUE(GoesBefore(Policy::kWfbp, ready, early));
  EXPECT_TRUE(GoesBefore(Policy::kP3, urgent, ready));
  EXPECT_TRUE(GoesBefore(Policy::kP3, ready, early)) << "of one priority";
  for (const Policy policy : {Policy::kFifo, Policy::kWfbp, Policy::kP3}) {
    for (const Place& a : {early, urgent, ready}) {
      EXPECT_FALSE(GoesBefore(policy, a, a));
      for (const Place& b : {early, urgent, ready}) {
        EXPECT_FALSE(GoesBefore(policy, a, b) && GoesBefore(policy, b, a));
      }
    }
  }
}

// The ranks of a book use the same ids, and each finds only its own tensors.
TEST(TensorBook, EachRankHasItsOwn) {
  constexpr int kFirst = 5, kLast = 7;
  TensorBook book(kFirst, 3);
  const auto count = [&](int rank) {
    int tensors = 0;
    book.ForEach(rank, [&](const OwnTensor&) { ++tensors; });
    return tensors;
  };
  const auto report = std::make_shared<const Report>();
  for (int round = 0; round < 3; ++round) {
    book.Insert(kFirst, 7, {.report = report, .started = 5});
    EXPECT_EQ(book.Find(kLast, 7), nullptr);
    book.Insert(kLast, 7, {.report = report});
    book.Insert(kLast, 8, {.report = report});
    EXPECT_EQ(count(kFirst), 1);
    EXPECT_EQ(count(kLast), 2);
    book.Erase(kFirst, 8);
    EXPECT_NE(book.Find(kLast, 8), nullptr) << "another rank's";
    book.Insert(kFirst, 7, {.report = report, .started = 6});  // replaces the previous one
    EXPECT_EQ(book.Find(kFirst, 7)->started, 6u);
    book.Erase(kFirst, 7);
    EXPECT_EQ(book.Find(kFirst, 7), nullptr);
    ASSERT_NE(book.Find(kLast, 7), nullptr);
    EXPECT_EQ(book.Find(kLast, 7)->started, 0u);
    book.Erase(kLast, 7);
    book.Erase(kLast, 8);
    book.Erase(kLast, 8);
    EXPECT_EQ(count(kLast), 0);
  }
  EXPECT_EQ(report.use_count(), 1) << "what is erased holds nothing";
}

// Compares with a std::map: the same content after every step, values that never move, and no more
// of them than were ever in use at one time.
TEST(RecycledMap, IsAMapThatUsesItsValuesAgain) {
  std::mt19937_64 random(17);
  RecycledMap<uint64_t> map;
  std::map<uint64_t, std::pair<uint64_t, const uint64_t*>> expected;
  std::set<const uint64_t*> places;
  size_t most = 0;
  EXPECT_EQ(map.Find(0), nullptr);
  for (uint64_t step = 0; step < 20000; ++step) {
    const uint64_t key = random() % (step < 10000 ? 24 : 200);
    if (random() % 2 == 0) {
      map.Erase(key);
      expected.erase(key);
    } else {
      uint64_t& value = map.Insert(key);
      EXPECT_EQ(expected.contains(key), expected.contains(key) && &value == expected[key].second);
      value = step;
      expected[key] = {step, &value};
      places.insert(&value);
      most = std::max(most, expected.size());
    }
    ASSERT_EQ(map.size(), expected.size());
    const auto known = expected.find(key);
    ASSERT_EQ(map.Find(key), known == expected.end() ? nullptr : known->second.second);
    if (step % 100 != 0) continue;
    std::map<uint64_t, std::pair<uint64_t, const uint64_t*>> content;
    map.ForEach([&](uint64_t id, const uint64_t& value) { content[id] = {value, &value}; });
    ASSERT_EQ(content, expected) << "step " << step;
  }
  EXPECT_EQ(places.size(), most);
}

}  // namespace
}  // namespace thinwire
