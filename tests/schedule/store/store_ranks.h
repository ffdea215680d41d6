// A store whose workers and servers are threads of the test.
#ifndef THINWIRE_TESTS_SCHEDULE_STORE_STORE_RANKS_H_
#define THINWIRE_TESTS_SCHEDULE_STORE_STORE_RANKS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "schedule/hash.h"
#include "schedule/store_host/serve.h"
#include "schedule/store_host/worker.h"
#include "tests/compress/values.h"
#include "transport/messages/in_process.h"

namespace thinwire {

inline uint64_t DigestOf(const std::vector<float>& values) {
  return DigestBytes({reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
}

struct StoreRanks {
  int workers = 2, servers = 1;
  std::string mode = "sync", codec = "fp32";
  size_t slice_elements = 4096, bigarray_bound = 0;
  std::chrono::milliseconds timeout{20000};

  std::function<void(const StoreTrace&)> trace = nullptr;  // called by all servers

  std::shared_ptr<MessageHub> hub = MakeMessageHub({});
  std::vector<absl::Status> served = std::vector<absl::Status>(8);  // what each Serve returned
  std::vector<uint64_t> server_bytes = std::vector<uint64_t>(8);

  StoreWorker::Options WorkerOptions() const {
    return {.workers = workers,
            .mode = StoreMode::Parse(mode).value(),
            .codec = CodecPair::Parse(codec).value(),
            .layout = {.servers = servers,
                       .slice_elements = slice_elements,
                       .bigarray_bound = bigarray_bound},
            .timeout = timeout};
  }
  std::unique_ptr<MessagePlane> WorkerPlane(int worker) {
    std::vector<int> calls;
    for (int server = 0; server < servers; ++server) {
      calls.push_back(RankOfServer(workers, server));
    }
    return JoinMessageHub(hub, RankOfWorker(workers, servers, worker), calls);
  }
  // Runs a server from its start to its end.
  std::function<absl::Status(int server)> serve = [this](int server) {
    auto plane = JoinMessageHub(hub, RankOfServer(workers, server), {});
    const absl::Status status = Serve(*plane, {.server = server,
                                               .workers = workers,
                                               .servers = servers,
                                               .timeout = timeout,
                                               .trace = trace});
    server_bytes[server] = plane->bytes_sent();
    return status;
  };
  // Runs `body` on every worker, and then closes the worker's store unless the body has taken it.
  void Run(const std::function<void(std::unique_ptr<StoreWorker>&)>& body) {
    std::vector<std::thread> threads;
    for (int server = 0; server < servers; ++server) {
      threads.emplace_back([this, server] { served[server] = serve(server); });
    }
    for (int rank = 0; rank < workers; ++rank) {
      threads.emplace_back([this, rank, &body] {
        auto worker = StoreWorker::Create(WorkerPlane(rank), WorkerOptions());
        ASSERT_TRUE(worker.ok()) << worker.status();
        body(*worker);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

inline TensorView View(std::vector<float>& values) {
  return {values.data(), values.size(), DType::kF32};
}

// Pushes zeros to the key and pulls it into w until the store fails; returns the failure.
inline absl::Status PushUntilItFails(StoreWorker& kv, std::string_view key, std::vector<float>& w) {
  std::vector<float> g(w.size());
  absl::Status status;
  while (status.ok()) {
    status = kv.PushPull(key, View(g), View(w), 0);
    if (status.ok()) status = kv.WaitAll();
  }
  return status;
}

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_STORE_STORE_RANKS_H_
