// Tests which ranks are on one node.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "schedule/join/links.h"
#include "tests/host_device/host_device.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

// Each letter is a rank and names its node.
Nodes Of(const std::string& letters) {
  std::vector<std::string> identities;
  for (const char letter : letters) identities.emplace_back(1, letter);
  return NodesOf(identities);
}

TEST(Nodes, AreSeveralOfOneSizeWhoseRanksAreNeighbours) {
  EXPECT_EQ(Of("aabb").local_size, 2);
  EXPECT_EQ(Of("aabbcc").local_size, 2);
  EXPECT_EQ(Of("aaaabbbb").local_size, 4);
  EXPECT_EQ(Of("aabb").refusal, "");
}

TEST(Nodes, SayWhyTheyAreNone) {
  for (const char* letters : {"a", "ab", "aa", "aab", "abab", "aabba", "aabbb", "abbb", "aabbaa"}) {
    EXPECT_EQ(Of(letters).local_size, 1) << letters;
    EXPECT_NE(Of(letters).refusal, "") << letters;
  }
  EXPECT_NE(Of("abab").refusal.find("rank"), std::string::npos);
  EXPECT_EQ(NodesOf(6, 3).local_size, 3);
  EXPECT_EQ(NodesOf(6, 4).refusal, "6 ranks are not whole nodes of 4");
}

Board BoardOf(Transport& transport) {
  constexpr std::chrono::seconds kTimeout(20);
  return {"nodes", transport.members(), transport, 0, Clock::now() + kTimeout, kTimeout};
}

TEST(Nodes, AreFoundAlikeOnAllRanks) {
  const Options options;
  std::vector<Transport> transports = MakeInProcessTransports(4);
  std::vector<std::thread> ranks;
  for (Transport& transport : transports) {
    ranks.emplace_back([&] {
      const absl::StatusOr<Nodes> nodes = LocateRanks(options, nullptr, BoardOf(transport));
      ASSERT_TRUE(nodes.ok()) << nodes.status();
      EXPECT_EQ(nodes->refusal, "all ranks are on one node");
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// A single rank's answer decides for all; they exchange answers over the host's transport.
TEST(Nodes, AreDirectIfEveryDeviceReachesItsPeers) {
  static const kernels::DeviceApi apart = [] {
    kernels::DeviceApi api = kernels::HostDeviceApi();
    api.reaches_peers = [](int, int* least) { return *least = 0; };
    return api;
  }();
  static const kernels::DeviceApi joined = [] {
    kernels::DeviceApi api = kernels::HostDeviceApi();
    api.reaches_peers = [](int, int* least) { return *least = 2, 0; };
    return api;
  }();
  for (const auto& [rank_apart, local_size] :
       {std::pair(-1, 2), std::pair(0, 2), std::pair(3, 2), std::pair(-1, 4), std::pair(1, 4)}) {
    Options options;
    options.local_size = local_size;
    options.transport = TransportKind::kNccl;
    std::vector<Transport> transports = MakeInProcessTransports(4);
    std::vector<std::thread> ranks;
    for (Transport& transport : transports) {
      ranks.emplace_back([&, apart_from = rank_apart, size = local_size] {
        const int rank = transport.members().rank;
        const auto device = MakeDevice(rank == apart_from ? apart : joined, rank, "a device");
        const absl::StatusOr<Nodes> nodes = LocateRanks(options, device.get(), BoardOf(transport));
        ASSERT_TRUE(nodes.ok()) << nodes.status();
        EXPECT_EQ(nodes->one, size == 4);
        EXPECT_EQ(nodes->refusal.empty(), size == 2);
        EXPECT_EQ(nodes->direct, apart_from < 0);
        EXPECT_EQ(nodes->linked, apart_from < 0);
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

}  // namespace
}  // namespace thinwire
