// Failures that need real processes and sockets.
#include "transport/gloo/gloo.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>

#include "schedule/engine/engine.h"
#include "tests/transport/listening.h"
#include "tests/transport/rank_processes.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class GlooProcesses : public RankProcesses {};

TEST_F(GlooProcesses, AKilledPeerIsLostAtOnce) {
  ExpectFailureAfter(SIGKILL, seconds(60), absl::StatusCode::kUnavailable);
}

TEST_F(GlooProcesses, AStoppedPeerIsATimeoutThatNamesIt) {
  ExpectFailureAfter(SIGSTOP, kShort, absl::StatusCode::kDeadlineExceeded);
}

// More reports than the control channel can have in flight: none of them may wait for rank 0.
TEST_F(GlooProcesses, AStoppedLeaderIsATimeoutThatNamesIt) {
  constexpr int kTensors = 300;
  min_bytes_ = 0;  // so that all tensors are reported
  const pid_t leader = StartPeer(0);
  const auto engine = Connect(1, 2, kShort);
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(Reduce(*engine).ok());
  kill(leader, SIGSTOP);
  const auto begin = Clock::now();
  std::vector<std::vector<float>> values(kTensors, std::vector<float>(20000));
  std::vector<absl::StatusOr<UsePtr>> works;
  for (int i = 0; i < kTensors; ++i) {
    const TensorView view{values[i].data(), values[i].size()};
    works.push_back(engine->Start({.input = view, .output = view, .key = "t" + std::to_string(i)}));
  }
  for (const auto& work : works) {
    const absl::Status status = work.ok() ? (*work)->Wait() : work.status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_NE(status.message().find("rank 0"), absl::string_view::npos) << status;
  }
  EXPECT_LT(Clock::now() - begin, seconds(30));
}

TEST_F(GlooProcesses, ARankThatNeverComesIsNamed) {
  const auto begin = Clock::now();
  const auto transport = ConnectGloo(Rank(0, 3, begin + milliseconds(300)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(transport.status())) << transport.status();
  EXPECT_NE(transport.status().message().find("rank 1 did not come"), absl::string_view::npos)
      << transport.status();
  EXPECT_LT(Clock::now() - begin, seconds(30));
}

TEST_F(GlooProcesses, AnUnknownInterfaceIsRefusedWithTheKnownOnes) {
  GlooOptions options = Rank(0, 2, Clock::now() + seconds(20));
  options.interface = "nope0";
  const auto transport = ConnectGloo(options);
  EXPECT_TRUE(absl::IsInvalidArgument(transport.status())) << transport.status();
  EXPECT_NE(transport.status().message().find("lo"), absl::string_view::npos);
}

TEST_F(GlooProcesses, ConnectByInterfaceByNameAndByIpv6) {
  for (const auto& [interface, host] : std::vector<std::pair<std::string, std::string>>{
           {"lo", ""}, {"", "localhost"}, {"", "::1"}, {"", "127.0.0.1"}}) {
    const absl::StatusOr<Address> address = LocalAddress(interface, host);
    ASSERT_TRUE(address.ok()) << address.status();
    if (!Listener::Open(*address).ok()) continue;  // this machine has no IPv6
    absl::StatusOr<Transport> transports[2];
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      GlooOptions options = Rank(rank, 2, Clock::now() + seconds(20));
      options.interface = interface;
      options.rendezvous_host = host;
      options.prefix = interface + host;
      ranks.emplace_back([=, &transports] { transports[rank] = ConnectGloo(options); });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const auto& made : transports) EXPECT_TRUE(made.ok()) << host << ": " << made.status();
  }
}

// The other rank starts only once this one has been seen to listen.
TEST_F(GlooProcesses, ListensOnLoopbackOnly) {
  std::vector<ListeningSocket> seen;
  const Deadline deadline = Clock::now() + seconds(20);
  absl::StatusOr<Transport> transports[2];
  std::thread connecting([&] { transports[0] = ConnectGloo(Rank(0, 2, deadline)); });
  while (seen.empty() && Clock::now() < deadline) seen = ListeningSockets();
  transports[1] = ConnectGloo(Rank(1, 2, deadline));
  connecting.join();
  for (const auto& made : transports) EXPECT_TRUE(made.ok()) << made.status();
  ASSERT_FALSE(seen.empty());
  for (const ListeningSocket& socket : seen) EXPECT_EQ(socket.address, "0100007F");
  EXPECT_TRUE(ListeningSockets().empty());
}

}  // namespace
}  // namespace thinwire
