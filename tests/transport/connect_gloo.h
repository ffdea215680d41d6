// Ranks as threads of one process that are connected by Gloo.
#ifndef THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
#define THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "transport/gloo/gloo.h"

namespace thinwire {

inline std::vector<Transport> ConnectGlooRanks(int world) {
  const std::shared_ptr<Store> store = MakeInProcessStore();
  std::vector<Transport> transports(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      auto made = ConnectGloo({.rank = r,
                               .size = world,
                               .store = store,
                               .prefix = "t/",
                               .interface = "",
                               .rendezvous_host = "",
                               .deadline = Clock::now() + std::chrono::seconds(20)});
      ASSERT_TRUE(made.ok()) << made.status();
      transports[r] = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return transports;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_CONNECT_GLOO_H_
