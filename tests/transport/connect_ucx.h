// Ranks as threads of one process: Gloo's control planes beside UCX's data planes.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/effort.h"
#include "tests/transport/connect_gloo.h"
#include "transport/ucx/ucx.h"

namespace thinwire {

// Why tests over UCX can't run here, or OK.
// With a sanitizer it counts as absent: the tracer of the leak sanitizer crashes now and then in a
// process that has loaded it, and the thread sanitizer can't see into it.
inline absl::Status UcxIsHere() {
  if (kSanitized) return absl::UnavailableError("UCX is not tried with a sanitizer");
  return UcxVersion("").status();
}

inline std::vector<std::unique_ptr<DataPlane>> ConnectUcxPlanes(int world) {
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

inline std::vector<Transport> ConnectUcxRanks(int world) {
  std::vector<Transport> transports = ConnectGlooRanks(world);
  std::vector<std::unique_ptr<DataPlane>> planes = ConnectUcxPlanes(world);
  for (int r = 0; r < world; ++r) transports[r].data = std::move(planes[r]);
  return transports;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_UCX_H_
