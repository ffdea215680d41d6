// Ranks as processes, for failures that need processes rather than threads.
#ifndef THINWIRE_TESTS_TRANSPORT_RANK_PROCESSES_H_
#define THINWIRE_TESTS_TRANSPORT_RANK_PROCESSES_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "schedule/engine/engine.h"
#include "transport/gloo/gloo.h"

namespace thinwire {

class RankProcesses : public testing::Test {
 protected:
  // A timeout that a test waits for, and that must suffice for everything before it.
  static constexpr std::chrono::milliseconds kShort{3000};

  void SetUp() override {
    folder_ =
        (std::filesystem::temp_directory_path() / ("thinwire_ranks_" + std::to_string(getpid())))
            .string();
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override {
    for (const pid_t peer : peers_) {
      kill(peer, SIGKILL);
      waitpid(peer, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  GlooOptions Rank(int rank, int size, Deadline deadline) {
    return {.rank = rank,
            .size = size,
            .store = MakeFileStore(folder_),
            .prefix = "p/",
            .interface = "",
            .rendezvous_host = "",
            .deadline = deadline,
            .key_file = "",
            .digest = ""};
  }

  virtual absl::StatusOr<Transport> ConnectPlanes(const GlooOptions& options) {
    return ConnectGloo(options);
  }

  std::unique_ptr<Engine> Connect(int rank, int size, std::chrono::milliseconds timeout) {
    auto transport = ConnectPlanes(Rank(rank, size, Clock::now() + std::chrono::seconds(20)));
    if (!transport.ok()) return nullptr;
    Options options;
    options.codecs = {*CodecPair::Parse("int4")};
    options.timeout = timeout;
    options.min_bytes = min_bytes_;
    return *Engine::Create(Settle(options, size), *std::move(transport));
  }

  // Starts a second process, which reduces until a call fails.
  pid_t StartPeer(int rank) {
    const pid_t pid = fork();
    if (pid != 0) {
      peers_.push_back(pid);
      return pid;
    }
    const auto engine = Connect(rank, 2, std::chrono::seconds(60));
    while (engine != nullptr && Reduce(*engine).ok()) continue;
    _exit(0);
  }

  static absl::Status Reduce(Engine& engine) {
    std::vector<float> values(300000, 1.0f);
    auto work = engine.Start({.input = {values.data(), values.size()},
                              .output = {values.data(), values.size()},
                              .key = "g"});
    return work.ok() ? (*work)->Wait() : work.status();
  }

  // Sends `signal` to the peer during a call. This rank must fail with `code` and an error that
  // names the peer.
  void ExpectFailureAfter(int signal, std::chrono::milliseconds timeout, absl::StatusCode code) {
    const pid_t peer = StartPeer(1);
    const auto engine = Connect(0, 2, timeout);
    ASSERT_NE(engine, nullptr);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Reduce(*engine).ok());
    kill(peer, signal);
    const auto begin = Clock::now();
    absl::Status status;
    while (status.ok() && Clock::now() - begin < std::chrono::seconds(30)) {
      status = Reduce(*engine);
    }
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
  }

  std::string folder_;
  size_t min_bytes_ = Options().min_bytes;
  std::vector<pid_t> peers_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_RANK_PROCESSES_H_
