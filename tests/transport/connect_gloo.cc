#include "tests/transport/connect_gloo.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "transport/gloo/gloo.h"
#include "transport/gloo/gloo_links.h"

namespace thinwire {
namespace {

// Calls `connect` with each rank's options, on a thread per rank. Returns the results by rank.
template <typename Made, typename Connect>
std::vector<Made> ConnectAll(int world, Connect connect) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  std::vector<Made> made(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      absl::StatusOr<Made> one = connect({.rank = r,
                                          .size = world,
                                          .store = store,
                                          .prefix = "t/",
                                          .interface = "",
                                          .rendezvous_host = "",
                                          .deadline = Clock::now() + std::chrono::seconds(20),
                                          .key_file = "",
                                          .digest = "",
                                          .congestion = ""});
      ASSERT_TRUE(one.ok()) << one.status();
      made[r] = *std::move(one);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

}  // namespace

std::vector<Transport> ConnectGlooRanks(int world) {
  return ConnectAll<Transport>(world, ConnectGloo);
}

std::vector<std::unique_ptr<GlooLinks>> ConnectGlooLinks(int world,
                                                         std::chrono::milliseconds last_words) {
  using Links = std::unique_ptr<GlooLinks>;
  return ConnectAll<Links>(world, [&](const GlooOptions& options) -> absl::StatusOr<Links> {
    absl::Status incomplete;
    absl::StatusOr<Links> links = ConnectGlooLinks(options, last_words, incomplete);
    if (!incomplete.ok()) return incomplete;
    return links;
  });
}

}  // namespace thinwire
