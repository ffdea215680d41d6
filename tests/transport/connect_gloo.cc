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

// What `connect` makes of each rank's options, by rank.
template <typename Made>
std::vector<Made> ConnectAll(int world, Failure::LostPeer lost_peer,
                             absl::StatusOr<Made> (*connect)(const GlooOptions&)) {
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
                                          .congestion = "",
                                          .failure = Failure::Make(lost_peer)});
      ASSERT_TRUE(one.ok()) << one.status();
      made[r] = *std::move(one);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

}  // namespace

std::vector<Transport> ConnectGlooRanks(int world) {
  return ConnectAll<Transport>(world, Failure::LostPeer::kFailsAll, ConnectGloo);
}

std::vector<std::shared_ptr<GlooLinks>> ConnectGlooLinks(int world, Failure::LostPeer lost_peer) {
  return ConnectAll<std::shared_ptr<GlooLinks>>(
      world, lost_peer,
      [](const GlooOptions& options) -> absl::StatusOr<std::shared_ptr<GlooLinks>> {
        absl::Status incomplete;
        absl::StatusOr<std::shared_ptr<GlooLinks>> links = ConnectGlooLinks(options, incomplete);
        if (!incomplete.ok()) return incomplete;
        return links;
      });
}

}  // namespace thinwire
