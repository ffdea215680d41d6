#include "tests/transport/connect_ucx.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "schedule/join/agree.h"
#include "tests/effort.h"
#include "tests/transport/connect_gloo.h"
#include "transport/in_process/in_process.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

absl::Status UcxIsHere() {
  if (kSanitized) return absl::UnavailableError("UCX is not tried with a sanitizer");
  return UcxVersion("").status();
}

namespace {

std::vector<std::unique_ptr<DataPlane>> ConnectOver(std::vector<Transport>& transports) {
  std::vector<std::unique_ptr<DataPlane>> planes(transports.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < transports.size(); ++r) {
    threads.emplace_back([&, r] {
      constexpr std::chrono::seconds kTimeout(20);
      const Deadline deadline = Clock::now() + kTimeout;
      absl::StatusOr<std::unique_ptr<DataPlane>> plane = ConnectUcx(
          {.members = transports[r].members(),
           .tell = TellerOf({"UCX", transports[r].members(), transports[r], 0, deadline, kTimeout}),
           .control = *transports[r].control,
           .deadline = deadline});
      ASSERT_TRUE(plane.ok()) << plane.status();
      planes[r] = *std::move(plane);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return planes;
}

}  // namespace

std::vector<std::unique_ptr<DataPlane>> ConnectUcxPlanes(int world) {
  std::vector<Transport> meeting = MakeInProcessTransports(world);
  return ConnectOver(meeting);
}

std::vector<Transport> ConnectUcxRanks(int world) {
  std::vector<Transport> transports = ConnectGlooRanks(world);
  std::vector<std::unique_ptr<DataPlane>> planes = ConnectOver(transports);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return transports;
}

}  // namespace thinwire
