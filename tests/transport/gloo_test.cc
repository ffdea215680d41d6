// Failures that only real processes and sockets show.
#include "transport/gloo/gloo.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include "schedule/engine.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class GlooProcesses : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        (std::filesystem::temp_directory_path() / ("thinwire_gloo_" + std::to_string(getpid())))
            .string();
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<Engine> Connect(int rank, int size, milliseconds timeout) {
    auto transport =
        ConnectGloo({rank, size, MakeFileStore(folder_), "p/", "", "", Clock::now() + seconds(20)});
    if (!transport.ok()) return nullptr;
    Options options;
    options.codecs = {*CodecPair::Parse("int4")};
    options.timeout = timeout;
    return *Engine::Create(options, *std::move(transport));
  }

  // A second process that reduces until it is told otherwise.
  pid_t StartPeer(int rank) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    const auto engine = Connect(rank, 2, seconds(20));
    while (engine != nullptr && Reduce(*engine).ok()) continue;
    _exit(0);
  }

  static absl::Status Reduce(Engine& engine) {
    std::vector<float> values(300000, 1.0f);
    auto work = engine.AllReduce({.input = {values.data(), values.size()},
                                  .output = {values.data(), values.size()},
                                  .key = "g"});
    return work.ok() ? (*work)->Wait() : work.status();
  }

  // Sends `signal` to the peer in the midst of things, and returns this rank's failure.
  absl::Status FailureAfter(int signal, milliseconds timeout, Clock::duration* took) {
    const pid_t peer = StartPeer(1);
    const auto engine = Connect(0, 2, timeout);
    EXPECT_NE(engine, nullptr);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Reduce(*engine).ok());
    kill(peer, signal);
    const auto begin = Clock::now();
    absl::Status status;
    while (status.ok() && Clock::now() - begin < seconds(30)) status = Reduce(*engine);
    *took = Clock::now() - begin;
    kill(peer, SIGKILL);
    waitpid(peer, nullptr, 0);
    return status;
  }

  std::string folder_;
};

TEST_F(GlooProcesses, AKilledPeerIsLostAtOnce) {
  Clock::duration took;
  const absl::Status status = FailureAfter(SIGKILL, seconds(20), &took);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
  EXPECT_LT(took, seconds(5));
}

TEST_F(GlooProcesses, AStoppedPeerIsATimeoutThatNamesIt) {
  Clock::duration took;
  const absl::Status status = FailureAfter(SIGSTOP, milliseconds(700), &took);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
  EXPECT_LT(took, seconds(5));
}

// More reports than the control channel has on its way at once: none of them may wait for rank 0.
TEST_F(GlooProcesses, AStoppedLeaderIsATimeoutThatNamesIt) {
  constexpr int kTensors = 300;
  const pid_t leader = StartPeer(0);
  const auto engine = Connect(1, 2, milliseconds(700));
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(Reduce(*engine).ok());
  kill(leader, SIGSTOP);
  const auto begin = Clock::now();
  std::vector<std::vector<float>> values(kTensors, std::vector<float>(20000));
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < kTensors; ++i) {
    const TensorView view{values[i].data(), values[i].size()};
    auto work = engine->AllReduce({.input = view, .output = view, .key = "t" + std::to_string(i)});
    ASSERT_TRUE(work.ok()) << work.status();
    works.push_back(*work);
  }
  for (const auto& work : works) {
    const absl::Status status = work->Wait();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_NE(status.message().find("rank 0"), absl::string_view::npos) << status;
  }
  EXPECT_LT(Clock::now() - begin, seconds(5));
  kill(leader, SIGKILL);
  waitpid(leader, nullptr, 0);
}

TEST_F(GlooProcesses, ARankThatNeverComesIsNamed) {
  const auto begin = Clock::now();
  const auto transport =
      ConnectGloo({0, 3, MakeFileStore(folder_), "p/", "", "", begin + milliseconds(300)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(transport.status())) << transport.status();
  EXPECT_NE(transport.status().message().find("rank 1 did not come"), absl::string_view::npos)
      << transport.status();
  EXPECT_LT(Clock::now() - begin, seconds(5));
}

TEST_F(GlooProcesses, AnUnknownInterfaceIsRefusedWithTheKnownOnes) {
  const auto transport =
      ConnectGloo({0, 2, MakeFileStore(folder_), "p/", "nope0", "", Clock::now() + seconds(1)});
  EXPECT_TRUE(absl::IsInvalidArgument(transport.status())) << transport.status();
  EXPECT_NE(transport.status().message().find("lo"), absl::string_view::npos);
}

// Local addresses of this process's listening sockets, as /proc writes them.
std::vector<std::string> ListeningAddresses() {
  std::vector<std::string> sockets, addresses;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    sockets.push_back(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, skip, inode;
      fields >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) fields >> skip;
      fields >> inode;
      const std::string socket = "socket:[" + inode + "]";
      if (state == "0A" && std::find(sockets.begin(), sockets.end(), socket) != sockets.end()) {
        addresses.push_back(local.substr(0, local.find(':')));
      }
    }
  }
  return addresses;
}

TEST_F(GlooProcesses, ListensOnLoopbackOnly) {
  std::vector<std::string> seen;
  std::thread connecting([&] {
    // Nobody answers, so it listens until its deadline.
    ConnectGloo({0, 2, MakeFileStore(folder_), "p/", "", "", Clock::now() + milliseconds(1500)})
        .status()
        .IgnoreError();
  });
  const auto begin = Clock::now();
  while (seen.empty() && Clock::now() - begin < seconds(2)) seen = ListeningAddresses();
  connecting.join();
  ASSERT_FALSE(seen.empty());
  for (const std::string& address : seen) EXPECT_EQ(address, "0100007F");
}

}  // namespace
}  // namespace thinwire
