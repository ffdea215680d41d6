// Replicas are bit-identical: in every codec, world and dtype, over many steps; and a rank whose
// result differs by one bit is found and named.
//
// `make replicas` runs a thousand steps of each; THINWIRE_TEST_STEPS is their number.
#include <chrono>
#include <cstdlib>
#include <string>

#include "compress/codec_list.h"
#include "schedule/digest.h"
#include "tests/effort.h"
#include "tests/schedule/ranks.h"
#include "tests/transport/damaged_plane.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

int StepsToRun() {
  const char* const steps = std::getenv("THINWIRE_TEST_STEPS");
  return steps == nullptr ? Steps(12) : std::atoi(steps);
}

// A tensor of each dtype. Odd sizes: less than a block, less than a shard a rank, several chunks.
struct Tensor {
  const char* name;
  DType dtype;
  size_t numel;
};
constexpr Tensor kTensors[] = {
    {"float", DType::kF32, 3001}, {"brain", DType::kBF16, 777}, {"half", DType::kF16, 97}};

// Bits of finite values of the dtype, other ones on each rank and in each step.
std::vector<uint8_t> Values(const Tensor& tensor, int rank, int step) {
  const std::vector<float> floats = Gradient(tensor.numel, tensor.numel, rank, step);
  std::vector<uint8_t> bytes(tensor.numel * SizeOf(tensor.dtype));
  CpuBackend().Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(floats.data()),
                      {bytes.data(), tensor.numel, tensor.dtype});
  return bytes;
}

// The digests of a rank's results, step by step.
std::vector<uint64_t> Train(int rank, Engine& engine, int steps) {
  std::vector<uint64_t> digests;
  for (int step = 0; step < steps; ++step) {
    for (const Tensor& tensor : kTensors) {
      std::vector<uint8_t> bytes = Values(tensor, rank, step);
      const TensorView view{bytes.data(), tensor.numel, tensor.dtype};
      auto work = engine.AllReduce({.input = view, .output = view, .key = tensor.name});
      EXPECT_TRUE(work.ok()) << work.status();
      if (!work.ok()) return digests;
      const absl::Status status = (*work)->Wait();
      EXPECT_TRUE(status.ok()) << status;
      digests.push_back(DigestBytes(bytes));
    }
    engine.EndStep();
  }
  return digests;
}

class ReplicaTest : public testing::TestWithParam<std::string> {};

std::vector<std::string> Codecs() {
  std::vector<std::string> specs = {"int4:hadamard=1",          "int8:rounding=stochastic",
                                    "int4:rounding=stochastic", "int8:down=int4",
                                    "onebit:down=onebit",       "topk:density=0.2"};
  for (const CodecTraits& codec : kCodecs) specs.emplace_back(codec.name);
  return specs;
}

INSTANTIATE_TEST_SUITE_P(All, ReplicaTest, testing::ValuesIn(Codecs()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

TEST_P(ReplicaTest, AllRanksHaveTheSameBitsInEveryStep) {
  for (const int world : {2, 3, 4, 5, 8}) {
    for (const bool momentum : {false, true}) {
      Options options = SmallChunks(GetParam());
      if (momentum) options.momentum.beta = 0.9f;
      options.check_replicas = 10;
      std::vector<std::vector<uint64_t>> digests(world);
      RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
        digests[rank] = Train(rank, engine, StepsToRun());
      });
      for (int rank = 1; rank < world; ++rank) {
        ASSERT_EQ(digests[rank], digests[0]) << world << " ranks, rank " << rank;
      }
    }
  }
}

// Flips a bit of a result on one rank of three, and trains until an error comes.
std::vector<absl::Status> TrainWithAFlip(const Options& options, int flip_at, size_t numel) {
  std::vector<Transport> transports = MakeInProcessTransports(3);
  std::unique_ptr<DataPlane>& plane = transports[2].data;
  plane = std::make_unique<DamagedPlane>(std::move(plane), FlippedBit(0, flip_at));
  std::vector<absl::Status> statuses(3);
  RunRanks(std::move(transports), options, [&](int rank, Engine& engine) {
    for (int step = 0; step < 100 && statuses[rank].ok(); ++step) {
      std::vector<float> values = Gradient(numel, 3, rank, step);
      statuses[rank] = AllReduce(engine, values, "g");
    }
  });
  return statuses;
}

void ExpectNamed(const std::vector<absl::Status>& statuses, const std::string& step) {
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    for (const std::string& word :
         {std::string("rank 2 has digest"), std::string("'g'"), "step " + step + ":"}) {
      EXPECT_NE(status.message().find(word), absl::string_view::npos) << word << ": " << status;
    }
  }
}

TEST(ReplicaCheckTest, AFlippedBitNamesRankTensorAndStep) {
  Options options = SmallChunks("int4");
  options.one_hop_bytes = 0;
  options.check_replicas = 4;
  // Two hops a step: the flip is in the results of step 4.
  ExpectNamed(TrainWithAFlip(options, 7, 900), "4");
}

TEST(ReplicaCheckTest, SmallTensorsAreComparedAsWell) {
  Options options;
  options.timeout = std::chrono::seconds(20);
  options.check_replicas = 1;
  ExpectNamed(TrainWithAFlip(options, 2, 48), "3");
}

TEST(ReplicaCheckTest, OffItComparesNothing) {
  Options options = SmallChunks("int4");
  options.one_hop_bytes = 0;
  for (const absl::Status& status : TrainWithAFlip(options, 7, 900)) EXPECT_TRUE(status.ok());
}

TEST(DigestTest, EveryBitAndTheLengthCount) {
  std::vector<uint8_t> bytes(101);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(31 * i);
  const uint64_t before = DigestBytes(bytes);
  EXPECT_EQ(before, DigestBytes(bytes));
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    EXPECT_NE(DigestBytes(bytes), before) << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  const std::vector<uint8_t> zeros(40);
  EXPECT_NE(DigestBytes({zeros.data(), 33}), DigestBytes({zeros.data(), 40}));
}

}  // namespace
}  // namespace thinwire
