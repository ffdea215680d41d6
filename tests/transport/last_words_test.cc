// The message of a rank that gives up connecting, to the ranks that are connected to it.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "tests/transport/calling.h"
#include "transport/gloo/gloo.h"
#include "transport/mesh/tcp.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kWorld = 3;
constexpr uint8_t kGivesUp = 7, kAnotherReason = 8;

GlooOptions Rank(int rank, const std::shared_ptr<Store>& store, Clock::duration patience) {
  GlooOptions options;
  options.rank = rank;
  options.size = kWorld;
  options.store = store;
  options.deadline = Clock::now() + patience;
  options.last_words = [](const absl::Status& reason) {
    const bool is_of_rank_2 = absl::StrContains(reason.message(), "rank 2 did not connect in time");
    ControlFrame frame{};
    frame[0] = is_of_rank_2 ? kGivesUp : kAnotherReason;
    return frame;
  };
  return options;
}

// Rank 2, which listens at `own`, meets the others and connects to rank 1 only: a socket that
// nobody serves replaces rank 0's.
std::vector<Descriptor> ConnectToRank1Only(const std::shared_ptr<Store>& store,
                                           const Listener& own) {
  const absl::StatusOr<Listener> nobody = Listener::Open(*LocalAddress("", ""));
  MeshOptions options;
  options.rank = kWorld - 1;
  options.size = kWorld;
  options.store = store;
  options.deadline = Clock::now() + seconds(20);
  absl::StatusOr<Meeting> meeting = Meet(options, "", own.address());
  EXPECT_TRUE(meeting.ok()) << meeting.status();
  meeting->addresses[0] = nobody->address();
  return CallUntilConnected(1, options, *meeting);
}

// Returns what rank 1, which all ranks are connected to, receives from rank 0, which times out.
absl::StatusOr<ControlMessage> HeardByRank1(Clock::duration patience) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  absl::StatusOr<ControlMessage> heard = absl::UnknownError("nothing yet");
  std::thread rank0([&] {
    const absl::Status status = ConnectGloo(Rank(0, store, patience)).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  });
  std::thread rank1([&] {
    const absl::StatusOr<Transport> transport = ConnectGloo(Rank(1, store, seconds(20)));
    heard = transport.ok() ? transport->control->Receive() : transport.status();
  });
  const absl::StatusOr<Listener> rank2 = Listener::Open(*LocalAddress("", ""));
  const std::vector<Descriptor> connections = ConnectToRank1Only(store, *rank2);
  rank0.join();
  rank1.join();
  return heard;
}

// On an overloaded machine rank 0 may give up before it is connected, or because of another rank,
// so each further attempt has more time.
TEST(LastWords, ARankThatGivesUpTellsThoseThatItIsConnectedWith) {
  absl::StatusOr<ControlMessage> heard = absl::UnknownError("not tried");
  for (milliseconds patience(200); patience < seconds(60); patience *= 4) {
    heard = HeardByRank1(patience);
    if (heard.ok() && heard->frame[0] == kGivesUp) break;
  }
  ASSERT_TRUE(heard.ok()) << heard.status();
  EXPECT_EQ(heard->from, 0);
  EXPECT_EQ(heard->frame[0], kGivesUp);
}

}  // namespace
}  // namespace thinwire
