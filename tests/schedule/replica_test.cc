// Replicas are bit-identical with every codec, world size and dtype, over many steps.
//
// `make replicas` runs a thousand steps of each; THINWIRE_TEST_STEPS sets the number.
#include <chrono>
#include <cstdlib>
#include <string>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "schedule/hash.h"
#include "tests/effort.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

int StepsToRun() {
  const char* const steps = std::getenv("THINWIRE_TEST_STEPS");
  return steps == nullptr ? Steps(12) : std::atoi(steps);
}

// A tensor per dtype, of odd sizes: less than a block, less than a shard per rank, several chunks.
struct Tensor {
  const char* name;
  DType dtype;
  size_t numel;
};
constexpr Tensor kTensors[] = {
    {"float", DType::kF32, 3001}, {"brain", DType::kBF16, 777}, {"half", DType::kF16, 97}};

// Returns finite values of the dtype that differ by rank and step.
std::vector<uint8_t> Values(const Tensor& tensor, int rank, int step) {
  const std::vector<float> floats = Gradient(tensor.numel, tensor.numel, rank, step);
  std::vector<uint8_t> bytes(tensor.numel * SizeOf(tensor.dtype));
  CpuBackend().Decode(LosslessSpec(DType::kF32), reinterpret_cast<const uint8_t*>(floats.data()),
                      {bytes.data(), tensor.numel, tensor.dtype});
  return bytes;
}

// Returns the digests of a rank's results, by step and tensor.
std::vector<uint64_t> Train(int rank, Engine& engine, int steps) {
  std::vector<uint64_t> digests;
  for (int step = 0; step < steps; ++step) {
    for (const Tensor& tensor : kTensors) {
      std::vector<uint8_t> bytes = Values(tensor, rank, step);
      const TensorView view{bytes.data(), tensor.numel, tensor.dtype};
      auto work = engine.Start({.input = view, .output = view, .key = tensor.name});
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
