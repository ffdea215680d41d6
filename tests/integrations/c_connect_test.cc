// Peers that are lost while tw_comm_create goes on, after all data planes are there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "integrations/c/thinwire.h"
#include "schedule/join/agree.h"
#include "schedule/join/planes.h"
#include "tests/transport/connect_ucx.h"
#include "transport/gloo/gloo.h"

namespace thinwire {
namespace {

constexpr int kWorld = 4, kLost = 3, kTimeoutMs = 60000;
constexpr char kPrefix[] = "thinwire/lost/";

// What a rank's tw_comm_create comes to.
struct Outcome {
  tw_status status = TW_OK;
  std::string message;
};

Outcome Create(int rank, const std::string& folder) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = kWorld;
  options.store_path = folder.c_str();
  options.group = "lost";
  options.timeout_ms = kTimeoutMs;
  options.transport = "ucx";
  options.topology = "auto";
  options.local_size = 2;  // so that the links are measured
  tw_comm* comm = nullptr;
  const tw_status status = tw_comm_create(&options, &comm);
  tw_comm_destroy(comm);
  return {status, tw_last_error()};
}

// A rank that does what tw_comm_create does until it has agreed on UCX, and leaves the group then.
// Its memory, which `rest` holds, stays: so the others' blocks have where to go.
void ConnectAndLeave(const std::string& folder, std::unique_ptr<DataPlane>& rest) {
  const Deadline deadline = Clock::now() + std::chrono::milliseconds(kTimeoutMs);
  const std::shared_ptr<Store> store = MakeFileStore(folder);
  const std::string handshake = absl::StrCat(kPrefix, "handshake/");
  const absl::StatusOr<std::string> digest = store->Get(handshake + "0", deadline);
  ASSERT_TRUE(digest.ok()) << digest.status();
  ASSERT_TRUE(store->Set(handshake + std::to_string(kLost), *digest).ok());
  const std::string options = digest->substr(0, digest->find(" epoch="));
  absl::StatusOr<Transport> transport = ConnectGloo({.rank = kLost,
                                                     .size = kWorld,
                                                     .store = store,
                                                     .prefix = kPrefix,
                                                     .interface = "",
                                                     .rendezvous_host = "",
                                                     .deadline = deadline,
                                                     .key_file = "",
                                                     .digest = options});
  ASSERT_TRUE(transport.ok()) << transport.status();
  const std::chrono::milliseconds timeout(kTimeoutMs);
  const absl::StatusOr<Deadline> earliest =
      EarliestDeadline({"group", transport->members(), *transport, 0, deadline, timeout});
  ASSERT_TRUE(earliest.ok()) << earliest.status();
  const absl::StatusOr<std::string> words = ChooseDataPlane(
      {.kind = TransportKind::kUcx, .deadline = *earliest, .timeout = timeout}, *transport);
  ASSERT_TRUE(words.ok()) << words.status();
  rest = std::move(transport->data);
}

// UCX does not hear of it, and the links are measured over UCX.
TEST(UcxConnect, ARankThatIsLostWhileLinksAreMeasuredIsNamedOnEveryOther) {
  if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  const std::string folder = testing::TempDir() + "/thinwire_lost_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  std::vector<Outcome> outcomes(kLost);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kLost; ++rank) {
    ranks.emplace_back([&, rank] { outcomes[rank] = Create(rank, folder); });
  }
  std::unique_ptr<DataPlane> rest;
  ConnectAndLeave(folder, rest);
  for (std::thread& rank : ranks) rank.join();
  std::filesystem::remove_all(folder);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.status, TW_PEER_LOST) << outcome.message;
    EXPECT_NE(outcome.message.find("rank 3 is gone"), std::string::npos) << outcome.message;
  }
}

// It listens nowhere, and the others would wait for its address until their deadline.
TEST(Connect, ARankThatCantListenTellsTheOthersWhy) {
  for (const int silent : {0, 1}) {
    const std::string folder = testing::TempDir() + "/thinwire_silent_" + std::to_string(getpid());
    std::vector<Outcome> outcomes(2);
    const Deadline begin = Clock::now();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        tw_options options;
        tw_options_init(&options);
        options.rank = rank;
        options.size = 2;
        options.store_path = folder.c_str();
        options.timeout_ms = kTimeoutMs;
        if (rank == silent) options.interface_name = "nosuch0";
        tw_comm* comm = nullptr;
        const tw_status status = tw_comm_create(&options, &comm);
        tw_comm_destroy(comm);
        outcomes[rank] = {status, tw_last_error()};
      });
    }
    for (std::thread& rank : ranks) rank.join();
    std::filesystem::remove_all(folder);
    EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(kTimeoutMs / 2));
    EXPECT_EQ(outcomes[silent].status, TW_INVALID_ARGUMENT) << outcomes[silent].message;
    const Outcome& other = outcomes[1 - silent];
    EXPECT_EQ(other.status, TW_PEER_LOST) << other.message;
    for (const std::string& words : {absl::StrCat("rank ", silent, " failed"),
                                     std::string("no network interface 'nosuch0'")}) {
      EXPECT_NE(other.message.find(words), std::string::npos) << other.message;
    }
  }
}

}  // namespace
}  // namespace thinwire
