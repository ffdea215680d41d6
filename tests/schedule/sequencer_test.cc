// Sequencers of all ranks on a virtual clock: in every order in which messages, submissions and
// ends of exchanges can come, all chunks run, once, within the rules; what can't finish is named in
// time.
#include "schedule/order/sequencer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <tuple>

namespace thinwire {
namespace {

using ChunkId = std::pair<uint64_t, uint32_t>;

Report Of(uint64_t key, uint64_t call, uint32_t chunks = 1, uint64_t numel = 1024) {
  Report report;
  report.key = key;
  report.call = call;
  report.chunks = chunks;
  report.numel = numel;
  report.partition_hash = key * 1000 + chunks;
  report.priority = static_cast<int32_t>(key % 3);
  SetName("t" + std::to_string(key), {}, &report);
  return report;
}

// What stands for the engines, the control channel and the exchanges.
class Host {
 public:
  Host(int world, const Options& options, Matching matching)
      : options_(options), matching_(matching) {
    for (int r = 0; r < world; ++r) {
      ranks_.push_back(std::make_unique<Rank>(Membership{r, world}, options, matching));
    }
    ranks_[0]->sequencer.Begin(now_);
    CarryOut(0);
  }

  int world() const { return static_cast<int>(ranks_.size()); }
  void Advance(double seconds) { now_ += seconds; }

  void Submit(int rank, const Report& report) {
    ranks_[rank]->chunks_left[report.id()] = report.chunks;
    ranks_[rank]->sequencer.OnSubmit(report, now_);
    CarryOut(rank);
  }
  void EndStep(int rank) {
    ranks_[rank]->sequencer.EndStep(now_);
    CarryOut(rank);
  }
  void DirectDone(int rank, uint64_t id) {
    ranks_[rank]->chunks_left.erase(id);
    ranks_[rank]->sequencer.OnDirectDone(id);
    CarryOut(rank);
  }
  void Clock() {
    for (int r = 0; r < world(); ++r) {
      ranks_[r]->sequencer.OnClock(now_);
      CarryOut(r);
    }
  }

  // Pairs of ranks with a message on its way.
  std::vector<std::pair<int, int>> Deliverable() const {
    std::vector<std::pair<int, int>> pairs;
    for (const auto& [pair, queue] : wires_) {
      if (!queue.empty() && pair.first != silent_) pairs.push_back(pair);
    }
    return pairs;
  }
  void Deliver(std::pair<int, int> pair) {
    const Message message = wires_[pair].front();
    wires_[pair].pop_front();
    ranks_[pair.second]->sequencer.OnMessage(pair.first, message, now_);
    CarryOut(pair.second);
  }

  // Chunks that may end on a rank: all ranks have started them, and with Matching::kByOrder a chunk
  // that does not drain has a follower everywhere.
  std::vector<std::pair<int, ChunkId>> Endable() const {
    std::vector<std::pair<int, ChunkId>> endable;
    for (int r = 0; r < world() && !cut_; ++r) {
      for (const auto& [chunk, start] : ranks_[r]->running) {
        bool everywhere = true;
        for (const auto& rank : ranks_) everywhere = everywhere && rank->Passes(chunk, matching_);
        if (everywhere) endable.push_back({r, chunk});
      }
    }
    return endable;
  }
  void End(int rank, ChunkId chunk) {
    Rank& r = *ranks_[rank];
    const StartChunk start = r.running.at(chunk);
    r.running.erase(chunk);
    const bool last = --r.chunks_left.at(chunk.first) == 0;
    if (last) r.chunks_left.erase(chunk.first);
    r.sequencer.OnChunkDone(start, last, now_);
    CarryOut(rank);
  }

  bool InFlight(int rank, uint64_t id) const { return ranks_[rank]->chunks_left.contains(id); }
  bool IsIdle(int rank) const { return ranks_[rank]->chunks_left.empty(); }
  const std::vector<ChunkId>& Order(int rank) const { return ranks_[rank]->order; }
  size_t predicted() const { return predicted_; }
  std::string Describe(int rank) const { return ranks_[rank]->sequencer.Describe(); }
  // The first failure of a rank.
  const absl::Status& failure(int rank) const { return ranks_[rank]->failure; }
  // The ranks that need not echo it.
  int silent(int rank) const { return ranks_[rank]->silent; }
  // Nothing that this rank sends arrives any more.
  void Silence(int rank) { silent_ = rank; }
  // No exchange ends any more.
  void CutExchanges() { cut_ = true; }

 private:
  struct Rank {
    Rank(Membership members, const Options& options, Matching matching)
        : sequencer(members, options, matching) {}

    bool Passes(ChunkId chunk, Matching matching) const {
      const auto found = at.find(chunk);
      if (found == at.end()) return false;
      return matching == Matching::kByTag || drains[found->second] ||
             found->second + 1 < order.size();
    }

    Sequencer sequencer;
    std::map<uint64_t, uint32_t> chunks_left;  // of what is submitted and not done
    std::vector<ChunkId> order;                // as they were started
    std::vector<bool> drains;
    std::map<ChunkId, size_t> at;  // in `order`
    std::map<ChunkId, StartChunk> running;
    absl::Status failure;
    int silent = 0;
  };

  void CarryOut(int rank) {
    Outbox outbox;
    std::swap(outbox, ranks_[rank]->sequencer.outbox());
    for (const Action& action : outbox.actions()) {
      if (action.kind == Action::Kind::kStart) Start(rank, action.start);
      if (action.kind == Action::Kind::kFail && ranks_[rank]->failure.ok()) {
        ranks_[rank]->failure = action.reason;
        ranks_[rank]->silent = action.silent;
      }
      for (int to = 0; action.kind == Action::Kind::kSend && to < world(); ++to) {
        if (to == rank || (action.to != kEveryone && action.to != to)) continue;
        wires_[{rank, to}].push_back(action.message);
      }
    }
  }

  void Start(int rank, const StartChunk& start) {
    Rank& r = *ranks_[rank];
    const ChunkId chunk{start.id, start.chunk};
    EXPECT_TRUE(r.chunks_left.contains(start.id)) << "not submitted";
    EXPECT_TRUE(r.at.emplace(chunk, r.order.size()).second) << "started twice";
    r.order.push_back(chunk);
    r.drains.push_back(start.drain);
    r.running[chunk] = start;
    predicted_ += start.predicted ? 1 : 0;
    int ordered = 0, ahead = 0;
    for (const auto& [id, running] : r.running) ++(running.position == 0 ? ordered : ahead);
    EXPECT_LE(ordered, options_.lanes);
    EXPECT_LE(ahead, options_.predicted_lanes);
  }

  const Options options_;
  const Matching matching_;
  double now_ = 0.0;
  int silent_ = -1;
  bool cut_ = false;
  size_t predicted_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<std::pair<int, int>, std::deque<Message>> wires_;
};

// Runs one event that can happen; false if there is none. `more`: submissions that can happen.
bool RunOne(Host& host, std::mt19937_64& random, std::vector<std::function<void()>> more) {
  for (const auto& pair : host.Deliverable()) more.push_back([&host, pair] { host.Deliver(pair); });
  for (const auto& [rank, chunk] : host.Endable()) {
    more.push_back([&host, rank = rank, chunk = chunk] { host.End(rank, chunk); });
  }
  if (more.empty()) return false;
  host.Advance(1e-4);
  more[random() % more.size()]();
  return true;
}

void Settle(Host& host) {
  std::mt19937_64 random(0);
  while (RunOne(host, random, {})) {
  }
}

class SequencerTest : public testing::TestWithParam<std::tuple<Matching, Predict>> {
 protected:
  Matching matching() const { return std::get<0>(GetParam()); }
  Predict predict() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    All, SequencerTest,
    testing::Combine(testing::Values(Matching::kByTag, Matching::kByOrder),
                     testing::Values(Predict::kNever, Predict::kAlways)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == Matching::kByTag ? "ByTag" : "ByOrder") +
             (std::get<1>(info.param) == Predict::kAlways ? "Predicted" : "Announced");
    });

TEST_P(SequencerTest, EveryRandomScheduleRunsEveryChunkOnce) {
  constexpr uint64_t kSteps = 3;
  size_t predicted = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    Options options;
    // Every other world has heads of groups.
    const bool groups = seed % 2 == 1;
    const int world = groups ? 3 + random() % 6 : 2 + random() % 3;
    if (groups) options.control_tree_from = 2;
    options.lanes = 1 + random() % 3;
    options.predicted_lanes = 1 + random() % 4;
    options.policy = static_cast<Policy>(random() % 3);
    options.predict = predict();
    options.chunk_bytes = 4096;
    Host host(world, options, matching());
    const size_t tensors = 1 + random() % 5;
    std::vector<uint32_t> chunks(tensors);
    std::vector<uint64_t> numels(tensors);
    size_t all = 0;
    for (size_t t = 0; t < tensors; ++t) {
      all += chunks[t] = 1 + random() % 3;
      numels[t] = chunks[t] * (1 + random() % 1280);
    }
    // By rank: its step, and what of it is left to submit, in an order of its own.
    std::vector<uint64_t> step(world);
    std::vector<std::vector<size_t>> left(world);
    // A rank waits for a step's end before it submits the next one, or it does not.
    const bool waits = random() % 2 == 0;
    const auto begin = [&](int rank) {
      for (size_t t = 0; t < tensors; ++t) left[rank].push_back(t);
      std::shuffle(left[rank].begin(), left[rank].end(), random);
    };
    for (int r = 0; r < world; ++r) begin(r);
    const auto submit = [&](int rank) {
      if (left[rank].empty()) return begin(rank);
      const size_t t = left[rank].back();
      left[rank].pop_back();
      host.Submit(rank, Of(t + 1, step[rank], chunks[t], numels[t]));
      if (!left[rank].empty()) return;
      host.EndStep(rank);
      ++step[rank];
    };
    const auto may_submit = [&](int rank) {
      if (left[rank].empty()) return step[rank] < kSteps && (!waits || host.IsIdle(rank));
      // Of a name one use is in flight at a time.
      const uint64_t t = left[rank].back();
      return step[rank] == 0 || !host.InFlight(rank, Of(t + 1, step[rank] - 1).id());
    };
    for (bool more = true; more;) {
      std::vector<std::function<void()>> submissions;
      for (int r = 0; r < world; ++r) {
        if (may_submit(r)) submissions.push_back([&, r] { submit(r); });
      }
      more = RunOne(host, random, std::move(submissions));
    }
    for (int r = 0; r < world; ++r) {
      ASSERT_TRUE(host.failure(r).ok()) << "seed " << seed << ": " << host.failure(r);
      ASSERT_TRUE(host.IsIdle(r)) << "seed " << seed << ", rank " << r << "\n" << host.Describe(r);
      ASSERT_EQ(host.Order(r).size(), kSteps * all) << "seed " << seed << ", rank " << r;
      if (matching() == Matching::kByOrder) {
        ASSERT_EQ(host.Order(r), host.Order(0)) << "seed " << seed << ", rank " << r;
      }
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    predicted += host.predicted();
  }
  EXPECT_EQ(predicted > 0, predict() == Predict::kAlways);
}

// The first step of tensors 1 to 3 is over; the second one is predicted, and nobody has submitted
// it.
Host AfterOneStep(int world, Options options) {
  options.predict = Predict::kAlways;
  Host host(world, options, Matching::kByTag);
  Settle(host);
  for (uint64_t key = 1; key <= 3; ++key) {
    for (int r = 0; r < world; ++r) host.Submit(r, Of(key, 0));
  }
  for (int r = 0; r < world; ++r) host.EndStep(r);
  Settle(host);
  return host;
}

void ExpectInMessage(const absl::Status& status, absl::StatusCode code,
                     const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << " in " << status;
  }
}

// The time goes by until rank 0 has seen that something is overdue, and why.
void LetTimePass(Host& host, double seconds) {
  for (double passed = 0.0; passed < seconds; passed += 0.05) {
    host.Advance(0.05);
    host.Clock();
    Settle(host);
  }
}

TEST(Sequencer, APredictedTensorThatOneRankNeverSubmitsIsNamed) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  Host host = AfterOneStep(3, options);
  for (int r = 0; r < 3; ++r) {
    for (uint64_t key = 1; key <= 3; ++key) {
      if (r != 1 || key != 2) host.Submit(r, Of(key, 1));
    }
  }
  Settle(host);
  EXPECT_TRUE(host.failure(0).ok());
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t2'", "rank 1", "never submitted"});
}

// Its chunks hold every predicted lane, so that another tensor waits, which all ranks have.
TEST(Sequencer, ATensorThatHoldsUpAnotherIsNamed) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  options.predicted_lanes = 1;
  options.policy = Policy::kFifo;
  Host host = AfterOneStep(3, options);
  for (int r = 0; r < 3; ++r) host.Submit(r, Of(3, 1));
  host.Advance(0.5);
  for (const int r : {0, 2}) host.Submit(r, Of(1, 1));
  Settle(host);
  LetTimePass(host, 0.9);  // tensor 3 is overdue, tensor 1 is not
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", "holds up 't3'", "rank 1", "never submitted"});
}

TEST(Sequencer, RankZeroThatLeavesOutAPredictedTensorFailsAtTheStepsEnd) {
  Host host = AfterOneStep(2, {});
  for (const uint64_t key : {1, 3}) host.Submit(0, Of(key, 1));
  EXPECT_TRUE(host.failure(0).ok());
  host.EndStep(0);
  ExpectInMessage(host.failure(0), absl::StatusCode::kFailedPrecondition, {"'t2'", "rank 0"});
}

TEST(Sequencer, APredictedTensorOfAnotherSizeFailsWhereItIsSubmitted) {
  Host host = AfterOneStep(2, {});
  host.Submit(1, Of(1, 1, 2, 4096));
  ExpectInMessage(host.failure(1), absl::StatusCode::kFailedPrecondition,
                  {"'t1'", "4096", "rank 1"});
}

TEST(Sequencer, ASilentLeaderIsNamedByTheOthers) {
  Options options;
  options.timeout = std::chrono::milliseconds(1000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.Silence(0);
  for (int r = 0; r < 3; ++r) host.Submit(r, Of(1, 0));
  LetTimePass(host, 0.9);
  for (const int r : {1, 2}) EXPECT_TRUE(host.failure(r).ok()) << "rank 0 may still speak";
  LetTimePass(host, 0.2);
  for (const int r : {1, 2}) {
    ExpectInMessage(host.failure(r), absl::StatusCode::kDeadlineExceeded, {"'t1'", "rank 0"});
    EXPECT_EQ(host.silent(r), 1);
  }
}

// It has been asked ahead of the deadline, so that nobody has to wait for it after that.
TEST(Sequencer, ASilentRankIsNamedAtTheDeadline) {
  for (const bool submits : {true, false}) {
    Options options;
    options.timeout = std::chrono::milliseconds(5000);
    Host host(3, options, Matching::kByTag);
    Settle(host);
    host.CutExchanges();
    for (int r = 0; r < 3; ++r) {
      if (r != 1 || submits) host.Submit(r, Of(1, 0));
    }
    Settle(host);
    host.Silence(1);
    LetTimePass(host, 4.9);
    EXPECT_TRUE(host.failure(0).ok());
    LetTimePass(host, 0.15);
    ExpectInMessage(
        host.failure(0), absl::StatusCode::kDeadlineExceeded,
        {"'t1'", submits ? "rank 1 submitted it and then fell silent" : "rank 1 never submitted it",
         "look whether the process is stopped"});
    EXPECT_EQ(host.silent(0), 1);
  }
}

// Who waits for the next look at the clock adds to the timeout.
TEST(Sequencer, RankZeroFailsAsSoonAsItHearsOfAPassedDeadline) {
  Options options;
  options.timeout = std::chrono::milliseconds(5000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.CutExchanges();
  host.Silence(1);
  host.Submit(2, Of(1, 0));
  for (int ticks = 0; host.failure(0).ok(); ++ticks) {
    ASSERT_LT(ticks, 200);
    host.Advance(0.05);
    host.Clock();
    EXPECT_TRUE(host.failure(0).ok()) << "it had heard of the deadline before";
    Settle(host);
  }
}

// Rank 0 submits long after the others, and asks when it hears that their deadline has passed.
TEST(Sequencer, WhoAnswersIsNotSilent) {
  Options options;
  options.timeout = std::chrono::milliseconds(5000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.CutExchanges();
  for (const int r : {1, 2}) host.Submit(r, Of(1, 0));
  LetTimePass(host, 3.0);
  host.Submit(0, Of(1, 0));
  Settle(host);
  LetTimePass(host, 2.05);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", "all ranks submitted it"});
  EXPECT_EQ(host.silent(0), 0);
}

// Rank 0 has a later deadline than rank 2, whose question makes it ask the others in time.
TEST(Sequencer, AStoppedRankIsNamedAtTheFirstDeadline) {
  Options options;
  options.timeout = std::chrono::milliseconds(5000);
  Host host(3, options, Matching::kByTag);
  Settle(host);
  host.CutExchanges();
  host.Silence(1);
  host.Submit(2, Of(1, 0));
  LetTimePass(host, 3.0);
  host.Submit(0, Of(1, 0));
  Settle(host);
  LetTimePass(host, 1.9);
  EXPECT_TRUE(host.failure(0).ok());
  LetTimePass(host, 0.15);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", "rank 1 never submitted it", "no answer comes from there"});
}

TEST(ControlTree, HeadsOfGroupsStandBetween) {
  const ControlTree lead({0, 10}, 2), head({4, 10}, 2), member({5, 10}, 2), last({9, 10}, 2);
  EXPECT_EQ(lead.children(), (std::vector<int>{1, 2, 3, 4, 8}));
  EXPECT_EQ(head.children(), (std::vector<int>{5, 6, 7}));
  EXPECT_EQ(member.children(), std::vector<int>());
  EXPECT_EQ(member.head(), 4);
  EXPECT_EQ(last.GroupOf(8), (std::vector<int>{8, 9}));
  const ControlTree small({0, 10}, 11);
  EXPECT_EQ(small.children(), std::vector<int>{kEveryone});
}

Options InGroups() {
  Options options;
  options.control_tree_from = 2;
  options.timeout = std::chrono::milliseconds(1000);
  return options;
}

// Its group's head has told rank 0 nothing, of the group's other ranks either.
TEST(Sequencer, ARankOfAGroupThatNeverSubmitsIsNamedAlone) {
  Host host(10, InGroups(), Matching::kByTag);
  Settle(host);
  for (int r = 0; r < 10; ++r) {
    if (r != 6) host.Submit(r, Of(1, 0));
  }
  Settle(host);
  for (int r = 0; r < 10; ++r) EXPECT_TRUE(host.Order(r).empty());
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", ": rank 6 never submitted it"});
}

TEST(Sequencer, ASilentHeadIsNamedAlone) {
  Host host(10, InGroups(), Matching::kByTag);
  Settle(host);
  host.Silence(4);
  for (int r = 0; r < 10; ++r) host.Submit(r, Of(1, 0));
  LetTimePass(host, 1.5);
  ExpectInMessage(host.failure(0), absl::StatusCode::kDeadlineExceeded,
                  {"'t1'", ": rank 4 never submitted it, ", "look whether the process is stopped"});
}

// Ranks 4 to 7 are a group, and ranks 8 and 9.
TEST(Sequencer, RanksOfGroupsThatDisagreeAreNamed) {
  for (const int other : {6, 9}) {
    Host host(10, InGroups(), Matching::kByTag);
    Settle(host);
    for (int r = 0; r < 10; ++r) host.Submit(r, Of(1, 0, 1, r == other ? 4096 : 1024));
    Settle(host);
    int failed = 0;
    for (int r = 0; r < 10; ++r) {
      if (host.failure(r).ok()) continue;
      ++failed;
      ExpectInMessage(host.failure(r), absl::StatusCode::kFailedPrecondition,
                      {"'t1'", "4096 elements", "1024 elements", "rank " + std::to_string(other)});
    }
    EXPECT_EQ(failed, 1) << "the head says so, and all hear of it: the engine's duty";
  }
}

// A rank that is slow to finish a raw tensor reports it when the others are long done.
TEST(Sequencer, LateReportsOfFinishedRawTensorsLeaveNothingBehind) {
  Host host(3, {}, Matching::kByTag);
  Settle(host);
  Report raw = Of(1, 0);
  raw.direct = 1;
  for (int r = 0; r < 3; ++r) host.Submit(r, raw);
  host.Advance(0.2);
  host.Clock();  // all ranks report it, since it is late; the messages are on their way
  host.DirectDone(0, raw.id());
  Settle(host);
  for (const int r : {1, 2}) host.DirectDone(r, raw.id());
  LetTimePass(host, 40.0);
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(host.failure(r).ok()) << host.failure(r);
    EXPECT_EQ(host.Describe(r).find("'t1'"), std::string::npos) << host.Describe(r);
  }
}

}  // namespace
}  // namespace thinwire
