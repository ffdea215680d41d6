// Which way a group goes: what the user says, what the nodes allow, and what the links are worth.
#include "schedule/engine/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/collective/hierarchy.h"
#include "transport/board.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

std::vector<CodecPair> Codecs(const char* spec) { return {*CodecPair::Parse(spec)}; }

// Two nodes of two ranks: half of the bytes between nodes are saved, for 4 bytes and more inside.
TEST(Hierarchy, PaysWhereTheLinksInsideAreMuchFaster) {
  const Grid nodes{2, 2};
  EXPECT_TRUE(HierarchyPays(nodes, Codecs("int4"), {1e9, 60e6}));
  EXPECT_FALSE(HierarchyPays(nodes, Codecs("int4"), {1e9, 1e9}));
  EXPECT_FALSE(HierarchyPays(nodes, Codecs("int4"), {1e9, 250e6}));
  EXPECT_TRUE(HierarchyPays(nodes, Codecs("fp32"), {1e9, 250e6})) << "more bytes to save";
  EXPECT_FALSE(HierarchyPays(nodes, Codecs("topk"), {1e9, 1e3})) << "it has no hierarchy";
  EXPECT_TRUE(HierarchyPays({2, 8}, Codecs("int4"), {1e9, 60e6}));
}

TEST(Hierarchy, SendsFewerBytesBetweenNodesByTheRanksOfANode) {
  const CodecPair codec = *CodecPair::Parse("int4");
  for (const Grid& nodes : {Grid{2, 2}, Grid{3, 2}, Grid{2, 4}, Grid{8, 8}}) {
    EXPECT_NEAR(FlatBytes(nodes, codec).between,
                nodes.columns * HierarchicalBytes(nodes, codec).between, 1e-9);
  }
}

struct Chosen {
  Options options;
  std::string words;
};

// The choice of all ranks, which must be one.
Chosen Choose(Topology topology, const Nodes& nodes) {
  constexpr int kWorld = 4;
  std::vector<Transport> transports = MakeInProcessTransports(kWorld);
  std::vector<Chosen> chosen(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      Options options;
      options.topology = topology;
      const absl::StatusOr<ChosenTopology> choice =
          ChooseTopology(options, nodes, transports[rank], Clock::now() + std::chrono::seconds(20));
      ASSERT_TRUE(choice.ok()) << choice.status();
      chosen[rank] = {choice->options, choice->words};
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Chosen& one : chosen) EXPECT_EQ(one.words, chosen[0].words);
  return chosen[0];
}

TEST(Topology, GoesByNodesWhereTheUserSaysSoAndTheyAreThere) {
  const Chosen chosen = Choose(Topology::kHierarchical, NodesOf(4, 2));
  EXPECT_EQ(chosen.words, "hierarchical: 2 nodes of 2 ranks");
  EXPECT_EQ(chosen.options.local_size, 2);
}

TEST(Topology, GoesFlatAndSaysWhy) {
  for (const Topology topology : {Topology::kAuto, Topology::kHierarchical}) {
    const Chosen chosen = Choose(topology, NodesOf(4, 3));
    EXPECT_EQ(chosen.words, "flat, 4 ranks are not whole nodes of 3");
    EXPECT_EQ(GridFor(4, chosen.options).rows, 1);
  }
  EXPECT_EQ(Choose(Topology::kFlat, NodesOf(4, 2)).words, "flat");
}

// All ranks are threads here, so the links inside are no faster than those between.
TEST(Topology, IsMeasuredIfNobodySaysIt) {
  const Chosen chosen = Choose(Topology::kAuto, NodesOf(4, 2));
  EXPECT_NE(chosen.words.find("MB/s inside nodes of 2"), std::string::npos) << chosen.words;
}

// What the ranks but `stopped` end with, which stops when they begin to measure.
std::vector<absl::Status> ChooseWithout(int stopped, std::chrono::milliseconds timeout) {
  constexpr int kWorld = 4;
  std::vector<Transport> transports = MakeInProcessTransports(kWorld);
  std::vector<absl::Status> ends(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      Transport& transport = transports[rank];
      const Deadline deadline = Clock::now() + timeout;
      Options options;
      options.timeout = timeout;
      ends[rank] =
          rank == stopped
              ? EarliestDeadline({"links", {rank, kWorld}, transport, 0, deadline}).status()
              : ChooseTopology(options, NodesOf(kWorld, 2), transport, deadline).status();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return ends;
}

// Rank 1 waits for rank 3 then, and rank 3 for rank 2. On a machine that stands still others may be
// silent as well; they have more time in each further attempt.
TEST(Topology, WhoeverStopsWhileLinksAreMeasuredIsNamedOnAllOthers) {
  constexpr int kStopped = 2;
  const auto is_right = [](const absl::Status& end) {
    return absl::IsDeadlineExceeded(end) &&
           absl::StrContains(end.message(), "in time: rank 2 did not answer;");
  };
  std::vector<absl::Status> ends;
  for (std::chrono::milliseconds timeout(200); timeout < std::chrono::seconds(60); timeout *= 4) {
    ends = ChooseWithout(kStopped, timeout);
    if (std::count_if(ends.begin(), ends.end(), is_right) == 3) break;
  }
  for (const int rank : {0, 1, 3}) EXPECT_TRUE(is_right(ends[rank])) << rank << ": " << ends[rank];
}

}  // namespace
}  // namespace thinwire
