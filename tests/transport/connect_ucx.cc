#include "tests/transport/connect_ucx.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "tests/effort.h"
#include "tests/transport/connect_gloo.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

absl::Status UcxIsHere() {
  if (kSanitized) return absl::UnavailableError("UCX is not tried with a sanitizer");
  return UcxVersion("").status();
}

std::vector<std::unique_ptr<DataPlane>> ConnectUcxPlanes(int world) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  std::vector<std::unique_ptr<DataPlane>> planes(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      absl::StatusOr<std::unique_ptr<DataPlane>> plane =
          ConnectUcx({.rank = r,
                      .size = world,
                      .store = store,
                      .prefix = "t/",
                      .library = "",
                      .deadline = Clock::now() + std::chrono::seconds(20)});
      ASSERT_TRUE(plane.ok()) << plane.status();
      planes[r] = *std::move(plane);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return planes;
}

std::vector<Transport> ConnectUcxRanks(int world) {
  std::vector<Transport> transports = ConnectGlooRanks(world);
  std::vector<std::unique_ptr<DataPlane>> planes = ConnectUcxPlanes(world);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return transports;
}

}  // namespace thinwire
