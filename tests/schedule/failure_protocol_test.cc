// Whose echoes a failure waits for, before callers hear of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "schedule/engine/ending.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using Tell = FailureProtocol::Tell;

// Seconds that rank 0 of three takes to spread a failure that `fail` begins, with what peers say to
// it. The least of a few tries, since others may hold the processors in any one; no more of them
// once it is known to wait for nobody.
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

// Rank 2 echoes nothing, and what waits for it takes 250 ms.
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

// Or a rank that fails alone would never hear the end of it.
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
