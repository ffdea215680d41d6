// All algorithms without an engine: the ranks are advanced together. Each algorithm must send the
// bytes that it declares, give every rank the same bits, and divide by the use's divisor.
#include "schedule/collective/algorithm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/device.h"
#include "kernels/tuning.h"
#include "schedule/collective/partition.h"
#include "tests/host_device/host_device.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

constexpr size_t kNumel = 60000;

struct Rank {
  std::vector<float> input, output, residual;
  DeviceStream* stream = nullptr;  // of a device made of CPU threads; null: the host
  std::unique_ptr<Workspace> space;
  std::unique_ptr<ChunkRun> run;
  const Hop* hop = nullptr;
};

// Runs one chunk on all ranks, and returns the bytes sent per hop, averaged over the ranks.
std::vector<double> Exchange(const Partition& partition, const CodecPair& codec, uint64_t tag,
                             float scale, std::vector<Rank>& ranks) {
  const Chunk& chunk = partition.chunks[0];
  const int world = chunk.world();
  const auto view = [](std::vector<float>& v) { return View(v); };
  for (int r = 0; r < world; ++r) {
    Rank& rank = ranks[r];
    const ChunkJob job{.tag = tag,
                       .codec = codec,
                       .chunk = &chunk,
                       .input = view(rank.input),
                       .output = view(rank.output),
                       .residual = rank.residual.empty() ? nullptr : rank.residual.data(),
                       .momentum = {},
                       .absent = {},
                       .scale = scale};
    const Backend& backend = rank.stream == nullptr ? CpuBackend() : rank.stream->backend();
    rank.run.reset();
    rank.space = std::make_unique<Workspace>(backend, Membership{r, world});
    rank.run = chunk.algorithm->begin(job, *rank.space);
  }
  std::vector<double> sent;
  for (;;) {
    for (Rank& rank : ranks) {
      const absl::StatusOr<const Hop*> hop = rank.run->Advance();
      EXPECT_TRUE(hop.ok()) << hop.status();
      rank.hop = hop.value_or(nullptr);
      if (rank.stream == nullptr) continue;
      EXPECT_TRUE(rank.stream->Synchronize(Clock::now() + std::chrono::minutes(1)).ok());
    }
    if (ranks[0].hop == nullptr) return sent;
    sent.push_back(0);
    for (int to = 0; to < world; ++to) {
      for (int from = 0; from < world; ++from) {
        if (from == to) continue;
        const Bytes block = ranks[from].hop->send[to];
        const MutableBytes place = ranks[to].hop->recv[from];
        EXPECT_EQ(ranks[from].hop->tag, ranks[to].hop->tag);
        EXPECT_EQ(block.size(), place.size());
        if (block.size() == place.size()) std::copy(block.begin(), block.end(), place.begin());
        sent.back() += static_cast<double>(block.size()) / world;
      }
    }
  }
}

std::vector<Rank> Ranks(int world, size_t in, size_t out, int step) {
  std::vector<Rank> ranks(world);
  for (int r = 0; r < world; ++r) {
    ranks[r].input = Gradient(in, 1, r, step);
    ranks[r].output.resize(out);
    ranks[r].residual.resize(std::max(in, out));
  }
  return ranks;
}

Options By(const CodecPair& codec, Topology topology) {
  Options options;
  options.codecs = {codec};
  options.chunk_bytes = size_t{4} << 20;
  options.topology = topology;
  options.local_size = topology == Topology::kHierarchical ? 3 : 0;
  return options;
}

TEST(Algorithm, SendsWhatItSays) {
  constexpr int kWorld = 6;
  const std::vector<Segment> all = {{.name = "g", .count = kNumel, .total = kNumel}};
  for (const char* const text : {"fp32", "int8", "int4", "onebit", "topk:density=0.01"}) {
    const CodecPair codec = *CodecPair::Parse(text);
    const bool entries = codec.up.traits().entries();
    std::vector<Partition> partitions = {MakePartition(all, kWorld, By(codec, Topology::kFlat)),
                                         MakeWhole(Raw(), all, kWorld)};
    if (!entries) {
      partitions.push_back(MakeWhole(OneHop(), all, kWorld));
      partitions.push_back(MakePartition(all, kWorld, By(codec, Topology::kGrid)));
      partitions.push_back(MakePartition(all, kWorld, By(codec, Topology::kHierarchical)));
      partitions.push_back(MakeReduceScatter(all, kWorld, By(codec, Topology::kFlat)));
      partitions.push_back(MakeAllGather(all, kWorld, By(codec, Topology::kFlat)));
      partitions.push_back(MakeAllToAll(all, kWorld, By(codec, Topology::kFlat)));
    }
    for (const Partition& partition : partitions) {
      const Chunk& chunk = partition.chunks[0];
      const Algorithm& algorithm = *chunk.algorithm;
      ASSERT_EQ(partition.chunks.size(), 1u) << algorithm.name;
      const bool scatters = &algorithm == &ReduceScatter();
      const bool gathers = &algorithm == &AllGather();
      const bool alike = !scatters && &algorithm != &AllToAll();
      std::vector<Rank> ranks = Ranks(kWorld, kNumel,
                                      scatters  ? kNumel / kWorld
                                      : gathers ? kNumel * kWorld
                                                : kNumel,
                                      0);
      const std::vector<double> sent = Exchange(partition, codec, 1, 1.0f / kWorld, ranks);
      const std::vector<PhaseCost> costs = algorithm.costs(chunk, codec);
      ASSERT_EQ(sent.size(), static_cast<size_t>(algorithm.hops)) << algorithm.name;
      ASSERT_EQ(costs.size(), sent.size() + 1) << algorithm.name;
      for (size_t hop = 0; hop < sent.size(); ++hop) {
        // Shards are padded, and cut at block boundaries.
        EXPECT_NEAR(costs[hop].bytes, sent[hop], 0.04 * sent[hop] + 64)
            << algorithm.name << ", " << text << ", hop " << hop;
      }
      for (int r = 1; r < kWorld && alike; ++r) {
        ASSERT_EQ(ranks[r].output, ranks[0].output) << algorithm.name << ", " << text;
      }
    }
  }
}

// A launch on a device takes 256 wires. Ranks with codecs on a device get the bits of ranks on the
// host, whatever the position of their own shard among the wires.
TEST(Algorithm, MoreRanksThanALaunchTakesHaveTheHostsBits) {
  constexpr int kNodes = 260, kBlock = 128;
  static_assert(kNodes > kernels::kMaxWires + 3);
  const auto device = MakeDevice(kernels::HostDeviceApi(), 0, "host:0");
  const auto stream = *device->MakeStream();
  const CodecPair int8 = *CodecPair::Parse("int8:block=128");
  const CodecPair topk = *CodecPair::Parse("topk:density=0.01");
  const auto all = [](size_t numel) {
    return std::vector<Segment>{{.name = "g", .count = numel, .total = numel}};
  };
  Options by_nodes = By(int8, Topology::kHierarchical);
  by_nodes.local_size = 2;
  const struct {
    Partition partition;
    CodecPair codec;
    int size;  // ranks per node
  } cases[] = {
      {MakePartition(all(kNodes * kBlock), kNodes, By(int8, Topology::kFlat)), int8, 1},
      {MakePartition(all(kNodes * kBlock), kNodes * 2, by_nodes), int8, 2},
      {MakeWhole(OneHop(), all(1000), kNodes), int8, 1},
      {MakePartition(all(1000), kNodes, By(topk, Topology::kFlat)), topk, 1},
  };
  for (const auto& [partition, codec, size] : cases) {
    const Chunk& chunk = partition.chunks[0];
    SCOPED_TRACE(chunk.algorithm->name);
    const std::vector<float> values = Gradient(chunk.numel() + chunk.world(), 1, 0, 0);
    const auto run = [&](DeviceStream* of_some) {
      std::vector<Rank> ranks(chunk.world());
      for (int r = 0; r < chunk.world(); ++r) {
        ranks[r].input.assign(values.begin() + r, values.begin() + r + chunk.numel());
        ranks[r].output.resize(chunk.numel());
        ranks[r].residual.resize(chunk.numel());
      }
      for (const int node : {1, 255, 257, kNodes - 1}) ranks[node * size].stream = of_some;
      Exchange(partition, codec, 1, 1.0f / chunk.world(), ranks);
      return ranks;
    };
    const std::vector<Rank> hosts = run(nullptr), ranks = run(stream.get());
    for (int r = 0; r < chunk.world(); ++r) {
      ASSERT_EQ(ranks[r].output, hosts[0].output) << "rank " << r;
      ASSERT_EQ(ranks[r].residual, hosts[r].residual) << "rank " << r;
      if (ranks[r].stream == nullptr || chunk.algorithm->hops == 1) continue;
      const Range own = chunk.algorithm->second_hop(chunk, r);
      ASSERT_LT(own.begin, own.end) << "rank " << r << " has nothing to reduce";
    }
  }
}

}  // namespace
}  // namespace thinwire
