// Peers that fail or are lost during tw_comm_create.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
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

// The result of a rank's tw_comm_create.
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

// Does what tw_comm_create does until UCX is agreed on, then leaves the group. `rest` keeps the
// data plane alive, so that the others' blocks can still be delivered.
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

// UCX does not notice the loss while the links are measured over UCX.
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

// A fault of one rank, and the words that the others' messages must contain.
struct Fault {
  const char* name;
  void (*make)(tw_options& options);
  const char* words;
};

const Fault kFaults[] = {
    {"it listens nowhere", [](tw_options& o) { o.interface_name = "nosuch0"; },
     "no network interface 'nosuch0'"},
    {"a codec that there is none of", [](tw_options& o) { o.codec = "int5"; }, "int5"},
    {"an option out of range", [](tw_options& o) { o.lanes = 1000; }, "lanes"},
    {"no such timeout", [](tw_options& o) { o.timeout_ms = -1; }, "timeout -1 ms"},
    {"no such device", [](tw_options& o) { o.device = "cuda:4711"; }, "CUDA"},
    {"a trace in no folder", [](tw_options& o) { o.trace_path = "/proc/nowhere/trace.json"; },
     "trace_path is '/proc/nowhere/trace.json'"},
    {"events in no folder", [](tw_options& o) { o.flight_path = "/proc/nowhere/flight.txt"; },
     "flight_path is '/proc/nowhere/flight.txt'"},
    {"no key file", [](tw_options& o) { o.key_file = "/proc/nowhere/key"; }, "/proc/nowhere/key"},
};

tw_options OptionsOf(int rank) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = 2;
  options.timeout_ms = kTimeoutMs;
  return options;
}

Outcome CreateWith(const tw_options& options) {
  tw_comm* comm = nullptr;
  const tw_status status = tw_comm_create(&options, &comm);
  tw_comm_destroy(comm);
  return {status, tw_last_error()};
}

void ExpectHeard(const Outcome& other, int faulty, const std::string& words) {
  EXPECT_EQ(other.status, TW_PEER_LOST) << other.message;
  for (const std::string& expected : {absl::StrCat("rank ", faulty, " failed"), words}) {
    EXPECT_NE(other.message.find(expected), std::string::npos) << other.message;
  }
}

// Without the message the others would wait until their deadline.
TEST(Connect, ARankThatFailsAloneTellsTheOthersWhy) {
  for (const Fault& fault : kFaults) {
    for (const int faulty : {0, 1}) {
      SCOPED_TRACE(absl::StrCat("rank ", faulty, ": ", fault.name));
      const std::string folder =
          testing::TempDir() + "/thinwire_faulty_" + std::to_string(getpid());
      std::vector<Outcome> outcomes(2);
      const Deadline begin = Clock::now();
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < 2; ++rank) {
        ranks.emplace_back([&, rank] {
          tw_options options = OptionsOf(rank);
          options.store_path = folder.c_str();
          if (rank == faulty) fault.make(options);
          outcomes[rank] = CreateWith(options);
        });
      }
      for (std::thread& rank : ranks) rank.join();
      std::filesystem::remove_all(folder);
      EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(kTimeoutMs / 2));
      EXPECT_NE(outcomes[faulty].status, TW_OK);
      EXPECT_NE(outcomes[faulty].message.find(fault.words), std::string::npos)
          << outcomes[faulty].message;
      ExpectHeard(outcomes[1 - faulty], faulty, fault.words);
    }
  }
}

// A local group exists only while a rank waits in it.
TEST(Connect, ARankOfALocalGroupThatFailsAloneTellsThoseWhoWait) {
  std::atomic<bool> heard = false;
  std::thread waiting([&] {
    tw_options options = OptionsOf(0);
    options.local_group = "faulty";
    ExpectHeard(CreateWith(options), 1, "int5");
    heard = true;
  });
  while (!heard) {
    tw_options options = OptionsOf(1);
    options.local_group = "faulty";
    options.codec = "int5";
    EXPECT_EQ(CreateWith(options).status, TW_INVALID_ARGUMENT);
  }
  waiting.join();
}

}  // namespace
}  // namespace thinwire
