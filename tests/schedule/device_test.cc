// Engines with tensors on a device give the bits of engines on the host, in stream order, and fail
// like those: on CPU threads always, and on a GPU if there is one.
#include <gtest/gtest.h>

#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "tests/effort.h"
#include "tests/schedule/device_runs.h"

namespace thinwire {
namespace {

class DeviceTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const absl::StatusOr<std::shared_ptr<Device>> device = TestDevice(GetParam());
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
  }

  void ExpectTheHostsBits(const Options& options, const Case& run) {
    const History expected = Reduce(options, run, {});
    const std::vector<std::shared_ptr<Device>> all(run.world, device_);
    EXPECT_EQ(Reduce(options, run, all), expected);
  }

  std::shared_ptr<Device> device_;
};
INSTANTIATE_TEST_SUITE_P(On, DeviceTest, testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

TEST_P(DeviceTest, EveryCodecGivesTheHostsBits) {
  for (const char* codec :
       {"fp32", "bf16", "int8", "int4", "int4:hadamard=1", "int8:down=int4",
        "int4:block=1024,down=int8", "bf16:down=int8", "adaptive:bits=1,floor=1",
        "adaptive:down=int8", "int8:down=adaptive:bits=4"}) {
    for (const int world : {1, 2, 3}) {
      SCOPED_TRACE(std::string(codec) + ", world " + std::to_string(world));
      ExpectTheHostsBits(SmallChunks(codec), {.world = world});
    }
  }
}

TEST_P(DeviceTest, AGridGivesTheHostsBits) {
  for (const std::string codec : {"fp32", "int4", "int8:down=int4"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int world : {4, 6}) {
        // Half of the combinations, which contain every pair of values.
        if (kSanitized && (world == 4) != ((dtype == DType::kF32) == (codec == "int4"))) continue;
        SCOPED_TRACE(codec + ", world " + std::to_string(world));
        Options options = SmallChunks(codec);
        options.topology = Topology::kGrid;
        ExpectTheHostsBits(options, {.world = world, .numel = 5001, .dtype = dtype});
      }
    }
  }
}

// Some chunks lie in the absent segment, some in the other one, and one in both.
TEST_P(DeviceTest, AbsentParametersGiveTheHostsBits) {
  constexpr size_t kAbsent = Elements(5000), kOther = Elements(4000);
  for (const char* codec : {"int4", "onebit", "int4:hadamard=1", "topk:density=0.02", "adaptive"}) {
    SCOPED_TRACE(codec);
    ExpectTheHostsBits(SmallChunks(codec),
                       {.world = 3,
                        .numel = kAbsent + kOther,
                        .segments = {{"a", 0, kAbsent, kAbsent, 0}, {"b", 0, kOther, kOther, 0}},
                        .absent = true});
  }
}

TEST_P(DeviceTest, EveryDType) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const char* codec : {"int4", "fp32", "bf16", "adaptive"}) {
      SCOPED_TRACE(std::string(codec) + " of " + std::string(Name(dtype)));
      ExpectTheHostsBits(SmallChunks(codec), {.numel = 5001, .dtype = dtype});
    }
  }
}

TEST_P(DeviceTest, MomentumGivesTheHostsBits) {
  for (const char* codec : {"onebit", "onebit:down=onebit", "int8"}) {
    for (const bool nesterov : {false, true}) {
      for (const int world : {1, 2, 3}) {
        if (kSanitized && nesterov != (world == 3)) continue;
        SCOPED_TRACE(std::string(codec) + (nesterov ? ", Nesterov" : "") + ", world " +
                     std::to_string(world));
        Options options = SmallChunks(codec);
        options.momentum = {0.9f, nesterov};
        const Case run{.world = world};
        ExpectTheHostsBits(options, run);
        options.min_bytes = 1 << 20;  // all tensors go raw
        ExpectTheHostsBits(options, run);
      }
    }
  }
}

// The threshold stays on the device from the second step on, and each step has its own density.
TEST_P(DeviceTest, TopKGivesTheHostsBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* codec : {"topk:density=0.02", "topk:density=0.004,warmup=3,masking=0"}) {
      for (const float beta : {0.0f, 0.9f}) {
        for (const int world : {1, 2, 3}) {
          if (kSanitized && (world == 2 || (beta > 0) != (dtype == DType::kF32))) continue;
          SCOPED_TRACE(std::string(codec) + ", world " + std::to_string(world));
          Options options = SmallChunks(codec);
          options.momentum = {beta, world == 3};
          ExpectTheHostsBits(options, {.world = world, .dtype = dtype});
        }
      }
    }
  }
}

TEST_P(DeviceTest, SmallTensorsGoRaw) {
  Options options = SmallChunks("int4");
  options.min_bytes = 1 << 20;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t numel : {1, 7, 3000}) {
      ExpectTheHostsBits(options, {.world = 3, .numel = numel, .dtype = dtype});
    }
  }
}

TEST_P(DeviceTest, MidSizeTensorsGoInOneHop) {
  for (const char* codec : {"bf16", "int8", "int4", "int4:hadamard=1", "onebit", "adaptive"}) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(std::string(codec) + ", world " + std::to_string(world));
      Options options = SmallChunks(codec);
      options.chunk_bytes = 1 << 20;
      const Case run{.world = world};
      options.min_bytes = run.numel * 3 / 2;  // too little to send the tensor raw
      const std::vector<Segment> all = {{.name = "g", .count = run.numel, .total = run.numel}};
      ASSERT_EQ(DirectExchangeOf(all, run.dtype, world, options).algorithm, &OneHop());
      ExpectTheHostsBits(options, run);
    }
  }
}

// The elements of one codec that are not contiguous are copied together, and back.
TEST_P(DeviceTest, SeveralCodecsInOneTensor) {
  Options options = SmallChunks("int4");
  options.codecs.push_back(*CodecPair::Parse("bf16"));
  Case run;
  for (size_t i = 0; i < 10; ++i) {
    run.segments.push_back({.name = "p" + std::to_string(i),
                            .offset = 0,
                            .count = run.numel / 10,
                            .total = run.numel / 10,
                            .codec = static_cast<uint32_t>(i % 2)});
  }
  ExpectTheHostsBits(options, run);
}

// The bytes are the same, so ranks may have different devices.
TEST_P(DeviceTest, AGroupMayMixHostAndDevice) {
  const Case run{.world = 3};
  for (const size_t min_bytes : {0, 1 << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    EXPECT_EQ(Reduce(options, run, {device_, nullptr, device_}), Reduce(options, run, {}));
  }
}

TEST_P(DeviceTest, ManyTensorsAtOnce) {
  constexpr int kTensors = 12;
  Options options = SmallChunks("int4");
  options.min_bytes = 8000;  // some tensors go raw
  RunRanks(Wire::kInProcess, 2, options,
           [&](int rank, Engine& engine) {
             std::vector<std::unique_ptr<Tensor>> tensors;
             for (int i = 0; i < kTensors; ++i) {
               tensors.push_back(std::make_unique<Tensor>(device_, 4000 * (i + 1)));
             }
             for (int step = 0; step < kSteps; ++step) {
               std::vector<UsePtr> works;
               for (int i = 0; i < kTensors; ++i) {
                 const size_t numel = 1000 * (i + 1);
                 tensors[i]->Write(Stored(std::vector<float>(numel, rank + 1.0f), DType::kF32));
                 const TensorView view{tensors[i]->data(), numel};
                 auto work =
                     engine.Start({.input = view, .output = view, .key = "t" + std::to_string(i)});
                 ASSERT_TRUE(work.ok()) << work.status();
                 works.push_back(*work);
               }
               for (int i = 0; i < kTensors; ++i) {
                 ASSERT_TRUE(works[i]->Wait().ok());
                 float first;
                 std::memcpy(&first, tensors[i]->Read().data(), sizeof(first));
                 EXPECT_NEAR(first, 1.5f, 0.1f);
               }
             }
           },
           {device_, device_});
}

TEST_P(DeviceTest, WhatHasNoKernelsIsRefusedWithWhatToTake) {
  for (const char* codec :
       {"int8:rounding=stochastic", "int8:down=int4:rounding=stochastic", "ternary"}) {
    std::vector<Transport> transports = MakeInProcessTransports(2);
    const absl::Status status =
        Engine::Create(Settle(SmallChunks(codec), 2), std::move(transports[0]), device_).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    for (const char* words : {codec, "rounding=nearest", "CPU"}) {
      EXPECT_NE(status.message().find(words), absl::string_view::npos) << status;
    }
  }
}

TEST_P(DeviceTest, HostMemoryIsRefused) {
  std::vector<float> values(100000);
  RunRanks(Wire::kInProcess, 2, SmallChunks("int4"),
           [&](int, Engine& engine) {
             const absl::Status status = AllReduce(engine, values, "mine");
             EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
             EXPECT_NE(status.message().find("expected a tensor on that device"),
                       std::string::npos);
             EXPECT_NE(status.message().find("'mine'"), std::string::npos);
           },
           {device_, device_});
}

// Residuals and momentum move with their parameters, and stay on the device.
TEST_P(DeviceTest, ResidualsFollowTheirParameters) {
  const size_t numel = 6000;
  const std::vector<Segment> whole = {{.name = "a", .offset = 0, .count = 3000, .total = 3000},
                                      {.name = "b", .offset = 0, .count = 3000, .total = 3000}};
  const std::vector<Segment> turned = {whole[1], whole[0]};
  const auto run = [&](const std::vector<std::shared_ptr<Device>>& devices) {
    std::vector<std::vector<uint8_t>> results(2);
    RunRanks(
        Wire::kInProcess, 2, SmallChunks("int4"),
        [&](int rank, Engine& engine) {
          Tensor tensor(devices.empty() ? nullptr : devices[rank], numel * 4);
          for (int step = 0; step < kSteps; ++step) {
            tensor.Write(Stored(Gradient(numel, 5, rank, step), DType::kF32));
            const TensorView view{tensor.data(), numel};
            auto work = engine.Start({.input = view,
                                      .output = view,
                                      .key = step < 2 ? "first" : "second",
                                      .segments = step < 2 ? whole : turned});
            ASSERT_TRUE(work.ok()) << work.status();
            ASSERT_TRUE((*work)->Wait().ok());
          }
          results[rank] = tensor.Read();
        },
        devices);
    return results;
  };
  EXPECT_EQ(run({device_, device_}), run({}));
}

TEST_P(DeviceTest, ALostPeerIsAnErrorAndTheTensorIsTheCallersAgain) {
  Options options = SmallChunks("int4");
  options.timeout = std::chrono::seconds(2);
  for (const size_t min_bytes : {0, 1 << 20}) {
    options.min_bytes = min_bytes;
    RunRanks(Wire::kInProcess, 2, options,
             [&](int rank, Engine& engine) {
               if (rank == 1) return;  // leaves without submitting anything
               Tensor tensor(device_, 40000);
               tensor.Write(Stored(Gradient(10000, 1, 0, 0), DType::kF32));
               const TensorView view{tensor.data(), 10000};
               auto work = engine.Start({.input = view, .output = view, .key = "t"});
               const absl::Status status = work.ok() ? (*work)->Wait() : work.status();
               EXPECT_FALSE(status.ok());
               tensor.Read();
             },
             {device_, device_});
  }
}

}  // namespace
}  // namespace thinwire
