// Ranks that are lost between telling their address and greeting over UCX. Shared memory says of
// nobody that nobody reads it any more. Built where UCX's headers are.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
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

// What rank 2 of four says that connects with rank 3, a node of their own, while that one does no
// more than `theirs`: it has the address of a worker that lives until the end.
absl::Status ConnectWith(
    Clock::duration patience,
    const std::function<void(Transport&, const Board&, const std::string&)>& theirs) {
  std::vector<Transport> transports = MakeInProcessTransports(4);
  const auto worker = UcxWorker::Make(*LoadUcx(""), 2);
  const auto options = [&](int rank) {
    return UcxOptions{.members = {rank - 2, 2},
                      .transport = transports[rank],
                      .first = 2,
                      .deadline = Clock::now() + patience};
  };
  std::thread other([&] { theirs(transports[3], BoardOf(options(3)), *(*worker)->Address()); });
  const absl::Status status = ConnectUcx(options(2)).status();
  other.join();
  return status;
}

TEST_F(UcxGreeting, ARankThatDiesBeforeItIsALostPeer) {
  const absl::Status status = ConnectWith(
      seconds(60), [](Transport& transport, const Board& board, const std::string& address) {
        EXPECT_TRUE(TellAll(board, "address", address).ok());
        transport.Reset();
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 3 is gone")) << status;
}

TEST_F(UcxGreeting, ARankThatStopsBeforeItIsNamedByItsNumberInTheGroup) {
  absl::Status status;
  for (Clock::duration patience = milliseconds(300); patience < seconds(60); patience *= 4) {
    bool told = false;
    status = ConnectWith(patience, [&](Transport&, const Board& board, const std::string& address) {
      told = TellAll(board, "address", address).ok();
    });
    if (told) break;  // else this machine stood still
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 2 waited past its deadline for rank 3;"))
      << status;
}

}  // namespace
}  // namespace thinwire
