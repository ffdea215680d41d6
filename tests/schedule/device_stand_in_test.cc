// Tests that need a device made of CPU threads: its calls can be made to fail or be counted, and
// its streams can be captured or held up at will.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/host_device/host_device.h"
#include "tests/schedule/device_runs.h"

namespace thinwire {
namespace {

struct Breakage {
  const char* name;
  void (*apply)(kernels::DeviceApi*);
};

class BrokenDevice : public testing::TestWithParam<Breakage> {};
INSTANTIATE_TEST_SUITE_P(
    On, BrokenDevice,
    testing::Values(
        Breakage{"Stream", [](auto* api) { api->make_stream = [](int, void**) { return 2; }; }},
        Breakage{"Event", [](auto* api) { api->make_event = [](int, void**) { return 2; }; }},
        Breakage{"Record", [](auto* api) { api->record = [](int, void*, void*) { return 2; }; }},
        Breakage{"Memory",
                 [](auto* api) { api->allocate = [](int, size_t, void**) { return 2; }; }},
        Breakage{"Pinned",
                 [](auto* api) { api->allocate_pinned = [](int, size_t, void**) { return 2; }; }},
        Breakage{"Copy",
                 [](auto* api) {
                   api->copy = [](int, void*, const void*, size_t, void*) { return 2; };
                 }},
        Breakage{"Encode",
                 [](auto* api) {
                   api->encode = [](int, const kernels::EncodeLaunch*, void*) { return 2; };
                 }},
        Breakage{"EncodeEntries",
                 [](auto* api) {
                   api->encode_entries = [](int, const kernels::EncodeEntriesLaunch*, void*) {
                     return 2;
                   };
                 }},
        Breakage{"Reduce",
                 [](auto* api) {
                   api->reduce = [](int, const kernels::ReduceLaunch*, void*) { return 2; };
                 }},
        Breakage{"Decode",
                 [](auto* api) {
                   api->decode = [](int, const kernels::DecodeLaunch*, void*) { return 2; };
                 }}),
    [](const auto& info) { return info.param.name; });

// Rank 0's device fails; rank 1 is on the host.
TEST_P(BrokenDevice, IsAnErrorOnEveryRank) {
  const std::shared_ptr<Device> whole = *TestDevice("host");
  kernels::DeviceApi api = kernels::HostDeviceApi();
  GetParam().apply(&api);
  for (const size_t min_bytes : {0, 1 << 20}) {
    // An error after a rank's last message can affect only the next call of its peers.
    const std::string broken = GetParam().name;
    if (min_bytes > 0 && (broken == "Reduce" || broken == "Decode")) continue;
    if (min_bytes > 0 && broken == "EncodeEntries") continue;  // a raw exchange has no entries
    Options options = SmallChunks(broken == "EncodeEntries" ? "topk:density=0.02" : "int4");
    options.min_bytes = min_bytes;
    options.timeout = std::chrono::seconds(3);
    auto transports = MakeInProcessTransports(2);
    std::vector<absl::Status> seen(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        auto engine =
            Engine::Create(Settle(options, 2), std::move(transports[rank]),
                           rank == 0 ? MakeDevice(api, 0, "broken:0") : std::shared_ptr<Device>());
        seen[rank] = engine.status();
        if (!engine.ok()) return;
        Tensor tensor(rank == 0 ? whole : nullptr, 40000);
        const TensorView view{tensor.data(), 10000};
        auto work = (*engine)->Start({.input = view, .output = view, .key = "t"});
        seen[rank] = work.ok() ? (*work)->Wait() : work.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : seen) {
      for (const char* words : {"rank 0", "broken:0"}) {
        EXPECT_NE(status.message().find(words), std::string::npos)
            << "min_bytes " << min_bytes << ": " << status;
      }
    }
  }
}

// Rank 1 has a device, and a codec without kernels for it; the other ranks are on the host.
TEST(Create, OneRankWithoutKernelsIsNamedOnEveryRank) {
  const kernels::DeviceApi api = kernels::HostDeviceApi();
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    auto transports = Connect(wire, 3);
    std::vector<absl::Status> seen(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        const Options options = SmallChunks("int8:rounding=stochastic");
        auto engine =
            Engine::Create(Settle(options, 3), std::move(transports[rank]),
                           rank == 1 ? MakeDevice(api, 0, "new:0") : std::shared_ptr<Device>());
        seen[rank] = engine.status();
        if (!engine.ok()) return;
        std::vector<float> values(10000, 1.0f);
        seen[rank] = AllReduce(**engine, values, "t");
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : seen) {
      EXPECT_TRUE(absl::IsUnimplemented(status)) << Name(wire) << ": " << status;
      for (const char* words : {"rank 1: ", "no kernels for new:0", "rounding=nearest"}) {
        EXPECT_NE(status.message().find(words), std::string::npos) << Name(wire) << ": " << status;
      }
    }
  }
}

// Encoding an element also updates its momentum. Only a rank's own shard, which is not encoded,
// needs a separate pass; these shards together hold each element once.
TEST(Momentum, IsMadeByTheEncoder) {
  static std::atomic<size_t> elements;
  kernels::DeviceApi api = kernels::HostDeviceApi();
  api.accumulate = [](int ordinal, const kernels::AccumulateLaunch* launch, void* stream) {
    for (uint32_t i = 0; i < launch->jobs.count; ++i) elements += launch->jobs.job[i].numel;
    return kernels::HostDeviceApi().accumulate(ordinal, launch, stream);
  };
  Options options = SmallChunks("onebit:down=onebit");
  options.momentum.beta = 0.9f;
  for (const Topology topology : {Topology::kFlat, Topology::kGrid}) {
    options.topology = topology;
    const Case run{.world = 4};
    elements = 0;
    Reduce(options, run, {4, MakeDevice(api, 0, "host:0")});
    // A grid's column has two ranks, and both add up the same shards of their rows.
    const size_t times = topology == Topology::kGrid ? 2 : 1;
    EXPECT_EQ(elements, times * kSteps * run.numel);
  }
}

// CPU threads have no graphs; this stream only claims to be captured.
TEST(HeldUp, ACapturedStreamIsRefused) {
  static std::atomic<bool> captured;
  captured = false;
  kernels::DeviceApi api = kernels::HostDeviceApi();
  api.is_capturing = [](int, void*, int* capturing) { return *capturing = captured, 0; };
  const std::shared_ptr<Device> device = MakeDevice(api, 0, "host:0");
  Tensor tensor(device, 40000);
  tensor.Write(std::vector<uint8_t>(40000));
  for (const size_t min_bytes : {0, 1 << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    auto engine =
        Engine::Create(Settle(options, 1), std::move(MakeInProcessTransports(1)[0]), device);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const auto submit = [&] {
      const TensorView view{tensor.data(), 10000};
      return (*engine)->Start({.input = view, .output = view, .key = "t"});
    };
    const auto refused = [](const absl::Status& status) {
      return absl::IsInvalidArgument(status) &&
             status.message().find("being captured into a CUDA graph") != std::string::npos &&
             status.message().find("tensor 't'") != std::string::npos;
    };
    captured = true;
    EXPECT_TRUE(refused(submit().status())) << submit().status();
    captured = false;
    const auto work = submit();
    ASSERT_TRUE(work.ok()) << work.status();
    captured = true;
    EXPECT_TRUE(refused((*work)->WaitOn(nullptr)));
    captured = false;
    EXPECT_TRUE((*work)->WaitOn(nullptr).ok());
  }
}

TEST(HeldUp, AllReduceDoesNotWaitForTheCallersStream) {
  const std::shared_ptr<Device> stand_in = *TestDevice("host");
  for (const size_t min_bytes : {0, 1 << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    RunRanks(Wire::kInProcess, 2, options,
             [&](int rank, Engine& engine) {
               const kernels::DeviceApi& api = kernels::HostDeviceApi();
               void *producer = nullptr, *consumer = nullptr;
               ASSERT_EQ(api.make_stream(0, &producer), 0);
               ASSERT_EQ(api.make_stream(0, &consumer), 0);
               const size_t numel = 5000;
               const DeviceMemory memory = *stand_in->Allocate(numel * sizeof(float));
               auto* const values = reinterpret_cast<float*>(memory.get());
               std::atomic<bool> submitted = false;
               // The gradient is written after the call has returned, or never if the call waits
               // for it.
               kernels::QueueOnHostDevice(producer, [&] {
                 submitted.wait(false);
                 // Long enough for a lane that does not wait to read the old values.
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 std::fill_n(values, numel, rank == 0 ? 3.0f : 5.0f);
               });
               auto work = engine.Start({.input = {values, numel},
                                         .output = {values, numel},
                                         .key = "t",
                                         .stream = producer});
               submitted = true;
               submitted.notify_all();
               ASSERT_TRUE(work.ok()) << work.status();
               ASSERT_TRUE((*work)->WaitOn(consumer).ok());
               std::vector<float> seen(numel);
               kernels::QueueOnHostDevice(consumer,
                                          [&] { std::copy_n(values, numel, seen.data()); });
               ASSERT_TRUE(stand_in->Adopt(consumer)->Synchronize(InTime()).ok());
               for (const float value : seen) ASSERT_NEAR(value, 4.0f, 0.5f);
               api.destroy_stream(0, producer);
               api.destroy_stream(0, consumer);
             },
             {stand_in, stand_in});
  }
}

}  // namespace
}  // namespace thinwire
