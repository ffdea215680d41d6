// The topology of a group follows from the user's option, the nodes, and the rates of the links.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/collective/settle.h"
#include "schedule/join/links.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

std::vector<CodecPair> Codecs(const char* spec) { return {*CodecPair::Parse(spec)}; }

// Two nodes of two ranks: saves half of the bytes between nodes, for 4 bytes or more inside.
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

// In units of fp32 elements per node's network card. NCCL's fp32 ring sends 2 (n - 1) / n.
TEST(Hierarchy, KeepsBelowARingBetweenNodesWhereAFlatExchangeDoesNot) {
  const CodecPair int8 = *CodecPair::Parse("int8");
  const auto of_node = [](const Grid& nodes, const LinkBytes& bytes) {
    return nodes.columns * bytes.between / sizeof(float);
  };
  const Grid two{2, 8}, four{4, 8};
  EXPECT_NEAR(of_node(two, FlatBytes(two, int8)), 2.02, 0.01) << "a ring has 1.88";
  EXPECT_NEAR(of_node(two, HierarchicalBytes(two, int8)), 0.25, 0.01);
  EXPECT_NEAR(of_node(four, FlatBytes(four, int8)), 3.02, 0.01) << "a ring has 1.94";
}

TEST(Topology, AGridTakesNodesAsRows) {
  Options options;
  options.topology = Topology::kGrid;
  for (const auto& [world, local_size, rows] :
       {std::tuple(16, 8, 2), {12, 4, 3}, {6, 2, 3}, {32, 4, 8}, {14, 7, 2}}) {
    options.local_size = local_size;
    EXPECT_EQ(GridFor(world, options).rows, rows);
    EXPECT_EQ(GridFor(world, options).columns, local_size);
  }
  for (const int local_size : {0, 1, 5, 16}) {
    options.local_size = local_size;
    EXPECT_EQ(GridFor(16, options).rows, 4) << local_size;
  }
}

Board BoardOf(Transport& transport, std::chrono::milliseconds timeout) {
  return {"links", transport.members(), transport, 0, Clock::now() + timeout, timeout};
}

// A host's plane on which every exchange between nodes (of two ranks) takes 100 ms.
class SlowBetweenNodes final : public DataPlane {
 public:
  explicit SlowBetweenNodes(std::unique_ptr<DataPlane> inner) : inner_(std::move(inner)) {}

  const Membership& members() const override { return inner_->members(); }
  DataTraits traits() const override { return inner_->traits(); }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    bool crosses = false;
    for (int peer = 0; peer < size(); ++peer) {
      crosses = crosses || (peer / 2 != rank() / 2 && !send[peer].empty());
    }
    if (crosses) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return inner_->Start(tag, send, recv);
  }
  const std::shared_ptr<Failure>& failure() const override { return inner_->failure(); }
  uint64_t bytes_sent() const override { return inner_->bytes_sent(); }

 private:
  const std::unique_ptr<DataPlane> inner_;
};

struct Chosen {
  Options options;
  std::string words;
  std::optional<LinkRates> rates;
};

// Returns the choice of all ranks, which must agree.
Chosen Choose(Topology topology, const Nodes& nodes, const char* codec = "int4",
              bool slow_between = false) {
  constexpr int kWorld = 4;
  std::vector<Transport> transports = MakeInProcessTransports(kWorld);
  std::vector<Chosen> chosen(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      Transport& transport = transports[rank];
      if (slow_between) {
        transport.data = std::make_unique<SlowBetweenNodes>(std::move(transport.data));
      }
      Options options;
      options.codecs = Codecs(codec);
      options.topology = topology;
      const absl::StatusOr<ChosenTopology> choice =
          ChooseTopology(options, nodes, BoardOf(transport, std::chrono::seconds(20)));
      ASSERT_TRUE(choice.ok()) << choice.status();
      chosen[rank] = {*choice->options, choice->words, choice->rates};
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
  EXPECT_EQ(Choose(Topology::kGrid, NodesOf(4, 2)).words, "grid: 2 x 2 ranks");
}

// All ranks are threads, so the links inside nodes are no faster than those between them.
TEST(Topology, IsMeasuredIfNobodySaysIt) {
  const Chosen chosen = Choose(Topology::kAuto, NodesOf(4, 2));
  EXPECT_NE(chosen.words.find("MB/s inside nodes of 2"), std::string::npos) << chosen.words;
}

// topk at this density becomes int4 in a world of 4. int4 goes by nodes, which topk never does. On
// a busy machine exchanges inside nodes may be measured as slow, too.
TEST(Topology, IsChosenForTheCodecThatRunsAndAsTheSimulatorChooses) {
  const char* const kSparse = "topk:density=0.5";
  ASSERT_TRUE(Codecs(kSparse)[0].up.traits().entries());
  ASSERT_FALSE(Codecs(kSparse)[0].ForWorld(4).up.traits().entries());
  const Chosen chosen = Choose(Topology::kAuto, NodesOf(4, 2), kSparse, true);
  ASSERT_TRUE(chosen.rates.has_value());
  EXPECT_LE(chosen.rates->between, (64 << 10) / 0.1);
  const bool pays = HierarchyPays({2, 2}, Codecs("int4"), *chosen.rates);
  EXPECT_EQ(absl::StartsWith(chosen.words, "hierarchical: 2 nodes"), pays) << chosen.words;
  Options options;
  options.codecs = Codecs(kSparse);
  options.local_size = 2;
  const Settled simulated = Settle(options, 4, chosen.rates);
  EXPECT_EQ(simulated->topology, pays ? Topology::kHierarchical : Topology::kFlat);
  EXPECT_EQ(simulated->topology, chosen.options.topology);
  EXPECT_EQ(simulated->chunk_bytes, chosen.options.chunk_bytes);
  EXPECT_EQ(simulated->codecs[0].ToString(), chosen.options.codecs[0].ToString());
  const Settled on_fast_nodes = Settle(options, 4, LinkRates{1e9, 1e6});
  EXPECT_EQ(on_fast_nodes->topology, Topology::kHierarchical);
}

// Returns the results of all ranks if `stopped` stops when they begin to measure.
std::vector<absl::Status> ChooseWithout(int stopped, std::chrono::milliseconds timeout) {
  constexpr int kWorld = 4;
  std::vector<Transport> transports = MakeInProcessTransports(kWorld);
  std::vector<absl::Status> ends(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      const Board board = BoardOf(transports[rank], timeout);
      Options options;
      options.timeout = timeout;
      ends[rank] = rank == stopped ? EarliestDeadline(board).status()
                                   : ChooseTopology(options, NodesOf(kWorld, 2), board).status();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return ends;
}

// Rank 1 then waits for rank 3, and rank 3 for rank 2. On an overloaded machine others may be
// silent as well, so each further attempt has more time.
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
