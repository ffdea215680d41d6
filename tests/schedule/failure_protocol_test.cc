// Which peers' echoes a failure waits for before callers get the error.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "schedule/engine/ending.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

// Returns the seconds that rank 0 of three takes to carry through a failure; `fail` starts it and
// delivers what peers say. The least of several tries, since others may use the processors; tries
// end once one shows that it waits for no peer.
double SecondsToCarryThrough(void (*fail)(FailureProtocol&, const absl::Status&)) {
  const Options options;
  double least = 1e9;
  for (int attempt = 0; attempt < 10 && least > 0.2; ++attempt) {
    std::vector<Transport> transports = MakeInProcessTransports(3);
    Records records({0, 3}, options);
    FailureProtocol failure({0, 3}, options, transports[0], records);
    fail(failure, absl::DeadlineExceededError("rank 2 fell silent"));
    const Deadline start = Clock::now();
    failure.CarryThrough();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return least;
}

// Rank 2 sends no echo, and the wait for it lasts 250 ms.
TEST(FailureProtocol, WaitsForAPeerThatMayAnswer) {
  EXPECT_GT(SecondsToCarryThrough([](FailureProtocol& failure, const absl::Status& reason) {
              failure.Fail(reason, Tell::kEveryone);
              failure.OnPeerFailed(reason, 0);
            }),
            0.2);
}

TEST(FailureProtocol, WaitsForNoPeerThatIsKnownToBeSilent) {
  EXPECT_LT(SecondsToCarryThrough([](FailureProtocol& failure, const absl::Status& reason) {
              failure.Fail(reason, Tell::kEveryone, 1);
              failure.OnPeerFailed(reason, 1);
            }),
            0.2);
}

TEST(FailureProtocol, BelievesAPeerThatCallsAnotherSilent) {
  EXPECT_LT(SecondsToCarryThrough([](FailureProtocol& failure, const absl::Status& reason) {
              failure.OnPeerFailed(reason, 1);
            }),
            0.2);
}

// Otherwise a rank that fails alone would wait for an echo that never comes.
TEST(FailureProtocol, PassesOnWhoIsSilent) {
  std::vector<Transport> transports = MakeInProcessTransports(2);
  const Options options;
  Records records({0, 2}, options);
  FailureProtocol failure({0, 2}, options, transports[0], records);
  failure.OnPeerFailed(absl::DeadlineExceededError("rank 1 fell silent"), 1);
  const absl::StatusOr<ControlMessage> message = transports[1].control->Receive();
  ASSERT_TRUE(message.ok()) << message.status();
  const std::optional<ParsedFrame> parsed = ParseFrame(message->frame);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->silent, 1);
}

}  // namespace
}  // namespace thinwire
