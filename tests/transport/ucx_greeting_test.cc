// Ranks that are lost between sending their address and greeting over UCX. Shared memory does not
// report that its reader is gone. Built only where UCX's headers are installed.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "schedule/join/agree.h"
#include "tests/transport/connect_ucx.h"
#include "transport/in_process/in_process.h"
#include "transport/ucx/ucx.h"
#include "transport/ucx/ucx_library.h"
#include "transport/ucx/ucx_worker.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class UcxGreeting : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status here = UcxIsHere(); !here.ok()) GTEST_SKIP() << here;
  }
};

// Returns the result of rank 2 of four, which connects with rank 3; the two are a node. Rank 3 only
// runs `theirs`, which gets the address of a worker that lives until the end.
absl::Status ConnectWith(
    Clock::duration patience,
    const std::function<void(Transport&, const TellAddress&, const std::string&)>& theirs) {
  std::vector<Transport> transports = MakeInProcessTransports(4);
  const auto worker = UcxWorker::Make(*LoadUcx(""), 2);
  const auto options = [&](int rank) {
    const Board board{"UCX", {rank - 2, 2},           transports[rank],
                      2,     Clock::now() + patience, std::chrono::seconds(60)};
    return UcxOptions{.members = board.members,
                      .tell = TellerOf(board),
                      .control = *transports[rank].control,
                      .first = 2,
                      .deadline = board.deadline};
  };
  std::thread other([&] { theirs(transports[3], options(3).tell, *(*worker)->Address()); });
  const absl::Status status = ConnectUcx(options(2)).status();
  other.join();
  return status;
}

TEST_F(UcxGreeting, ARankThatDiesBeforeItIsALostPeer) {
  const absl::Status status = ConnectWith(
      seconds(60), [](Transport& transport, const TellAddress& tell, const std::string& address) {
        EXPECT_TRUE(tell(address).ok());
        transport.Reset();
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 3 is gone")) << status;
}

TEST_F(UcxGreeting, ARankThatStopsBeforeItIsNamedByItsNumberInTheGroup) {
  absl::Status status;
  for (Clock::duration patience = milliseconds(300); patience < seconds(60); patience *= 4) {
    bool told = false;
    status = ConnectWith(patience, [&](Transport&, const TellAddress& tell,
                                       const std::string& address) { told = tell(address).ok(); });
    if (told) break;  // else this machine stood still
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 2 waited past its deadline for rank 3;"))
      << status;
}

}  // namespace
}  // namespace thinwire
