#include "tests/schedule/ranks.h"

#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "tests/transport/connect_gloo.h"
#include "tests/transport/connect_ucx.h"
#include "transport/in_process/in_process.h"

namespace thinwire {

std::string Name(Wire wire) {
  switch (wire) {
    case Wire::kInProcess: return "InProcess";
    case Wire::kGloo: return "Gloo";
    case Wire::kUcx: return "Ucx";
  }
  return "unknown wire";
}

absl::Status IsHere(Wire wire) { return wire == Wire::kUcx ? UcxIsHere() : absl::OkStatus(); }

std::vector<Transport> Connect(Wire wire, int world) {
  switch (wire) {
    case Wire::kInProcess: return MakeInProcessTransports(world);
    case Wire::kGloo: return ConnectGlooRanks(world);
    case Wire::kUcx: return ConnectUcxRanks(world);
  }
  return {};
}

void RunRanks(std::vector<Transport> transports, const Options& options,
              const std::function<void(int, Engine&)>& body,
              const std::vector<std::shared_ptr<Device>>& devices) {
  const int world = static_cast<int>(transports.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < transports.size(); ++r) {
    threads.emplace_back([&, r] {
      auto engine = Engine::Create(Settle(options, world), std::move(transports[r]),
                                   devices.empty() ? nullptr : devices[r]);
      ASSERT_TRUE(engine.ok()) << engine.status();
      body(static_cast<int>(r), **engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RunRanks(Wire wire, int world, const Options& options,
              const std::function<void(int, Engine&)>& body,
              const std::vector<std::shared_ptr<Device>>& devices) {
  RunRanks(Connect(wire, world), options, body, devices);
}

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

Options SmallChunks(const std::string& codec) {
  Options options;
  options.codecs = {*CodecPair::Parse(codec)};
  options.chunk_bytes = 4096;
  options.least_message_bytes = 0;
  options.min_bytes = 0;
  options.timeout = std::chrono::seconds(60);
  options.predict = Predict::kNever;  // a busy machine's ranks would seem far apart
  return options;
}

std::vector<float> Gradient(size_t numel, uint64_t seed, int rank, int step) {
  std::mt19937_64 random(seed * 1000003 + rank * 10007 + step);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

absl::Status AllReduce(Engine& engine, std::vector<float>& values, const std::string& key, Op op) {
  auto work = engine.Start({.input = View(values), .output = View(values), .key = key, .op = op});
  return work.ok() ? (*work)->Wait() : work.status();
}

}  // namespace thinwire
