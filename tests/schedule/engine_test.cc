// An allreduce gives the reference's bits on every rank, whatever the order and the sizes.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "schedule/collective/algorithm.h"
#include "schedule/collective/partition.h"
#include "tests/effort.h"
#include "tests/schedule/nonfinite.h"
#include "tests/schedule/ranks.h"
#include "tests/schedule/reference_bits.h"

namespace thinwire {
namespace {

struct Case {
  Wire wire;
  int world;
  std::string codec;
};

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  std::string codec = info.param.codec;
  std::replace_if(
      codec.begin(), codec.end(), [](char c) { return !std::isalnum(c); }, '_');
  return absl::StrCat(Name(info.param.wire), info.param.world, codec);
}

class EngineTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const absl::Status here = IsHere(GetParam().wire); !here.ok()) GTEST_SKIP() << here;
  }
};

TEST_P(EngineTest, GivesTheReferencesBitsOnEveryRankOverManySteps) {
  const auto [wire, world, codec] = GetParam();
  ExpectTheReferencesBits(wire, world, SmallChunks(codec), 5003, Steps(20));
}

TEST_P(EngineTest, AnyOrderOfReadinessGivesTheSame) {
  const auto [wire, world, codec] = GetParam();
  constexpr int kTensors = 12, kSteps = Steps(8);
  std::vector<std::vector<std::vector<float>>> results(world);
  RunRanks(wire, world, SmallChunks(codec), [&](int rank, Engine& engine) {
    std::mt19937 random(rank + 99);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::vector<float>> tensors;
      for (int t = 0; t < kTensors; ++t) tensors.push_back(Gradient(300 + 701 * t, t, rank, step));
      std::vector<int> order(kTensors);
      for (int t = 0; t < kTensors; ++t) order[t] = t;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<UsePtr> works;
      for (const int t : order) {
        auto work = engine.Start({.input = View(tensors[t]),
                                  .output = View(tensors[t]),
                                  .key = "t" + std::to_string(t)});
        ASSERT_TRUE(work.ok()) << work.status();
        works.push_back(*work);
      }
      for (const auto& work : works) ASSERT_TRUE(work->Wait().ok());
      results[rank] = tensors;
    }
  });
  for (int r = 1; r < world; ++r) EXPECT_EQ(results[r], results[0]);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* codec :
       {"fp32", "bf16", "int8", "int4", "onebit", "onebit:down=onebit", "topk:density=0.02",
        "int8:rounding=stochastic", "int4:hadamard=1", "int8:block=128,down=int4:block=512"}) {
    for (int world = 1; world <= 5; ++world) {
      if (kSanitized && world == 4) continue;
      cases.push_back({Wire::kInProcess, world, codec});
    }
    for (const int world : {2, 3}) cases.push_back({Wire::kGloo, world, codec});
    for (const int world : {2, 3}) cases.push_back({Wire::kUcx, world, codec});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, EngineTest, testing::ValuesIn(Cases()), CaseName);

TEST(EngineInProcess, ReplicasStayIdenticalOver200Steps) {
  constexpr int kWorld = 3;
  std::vector<std::vector<float>> weights(kWorld, std::vector<float>(10007, 1.0f));
  RunRanks(Wire::kInProcess, kWorld, SmallChunks("int4"), [&](int rank, Engine& engine) {
    for (int step = 0; step < 200; ++step) {
      std::vector<float> values = Gradient(weights[rank].size(), 5, rank, step);
      ASSERT_TRUE(AllReduce(engine, values, "w").ok());
      for (size_t i = 0; i < values.size(); ++i) weights[rank][i] -= 0.1f * values[i];
    }
  });
  EXPECT_EQ(weights[1], weights[0]);
  EXPECT_EQ(weights[2], weights[0]);
}

// In one hop: every codec with fewer bytes than raw, with feedback and momentum.
TEST(EngineDirect, GivesTheReferencesBitsOnEveryRankOverManySteps) {
  constexpr size_t kNumel = 5003;
  const std::vector<Segment> all = {{.name = "g", .count = kNumel, .total = kNumel}};
  for (const auto& [wire, world, codec] : Cases()) {
    Options options = SmallChunks(codec);
    options.chunk_bytes = 1 << 20;
    options.min_bytes = 8000;
    const Algorithm* const direct = DirectExchangeOf(all, DType::kF32, world, options).algorithm;
    if (world == 1 || direct == nullptr || direct == &Raw()) continue;
    if ((kSanitized && world > 3) || !IsHere(wire).ok()) continue;
    for (const float beta : {0.0f, 0.9f}) {
      options.momentum = {.beta = beta, .nesterov = true};
      ExpectTheReferencesBits(wire, world, options, kNumel, Steps(5));
    }
  }
}

// Every length, by chunks and raw.
TEST(EngineInProcess, EveryLengthFrom0To4097) {
  for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
    Options options = SmallChunks("int4");
    options.min_bytes = min_bytes;
    std::vector<std::vector<float>> first;
    RunRanks(Wire::kInProcess, 2, options, [&](int rank, Engine& engine) {
      for (size_t numel = 0; numel <= 4097; ++numel) {
        std::vector<float> in = Gradient(numel, numel, rank, 0), out(numel, -1.0f);
        const std::vector<float> peer = Gradient(numel, numel, 1 - rank, 0);
        auto work = engine.Start({.input = View(in), .output = View(out), .caller_waits = true});
        ASSERT_TRUE(work.ok() && (*work)->Wait().ok()) << numel;
        for (size_t i = 0; i < numel; ++i) {
          const float tolerance = min_bytes == 0 ? 1.5e-3f : 0.0f;  // 2 of the 7 steps in 4.5 sigma
          ASSERT_NEAR(out[i], 0.5f * (in[i] + peer[i]), tolerance) << numel << " " << i;
        }
      }
    });
  }
}

TEST(EngineInProcess, SumAndMeanOfEveryDType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t min_bytes : {size_t{0}, size_t{1} << 20}) {
      Options options = SmallChunks("int8");
      options.min_bytes = min_bytes;
      RunRanks(Wire::kInProcess, 3, options, [&](int rank, Engine& engine) {
        // Whole numbers up to 127: exact in every dtype, and in int8 with a scale of 1.
        std::vector<float> values(1000);
        for (size_t i = 0; i < values.size(); ++i) values[i] = i % 256 == 0 ? 127 : float(i % 29);
        std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
        const TensorView view{bytes.data(), values.size(), dtype};
        for (const Op op : {Op::kSum, Op::kMean}) {
          std::vector<uint8_t> wire(EncodedBytes(Spec("fp32"), values.size()));
          ScalarBackend().Encode(Spec("fp32"), View(values), nullptr, wire.data());
          ScalarBackend().Decode(Spec("fp32"), wire.data(), view);
          auto work = engine.Start({.input = view, .output = view, .op = op});
          ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
          ScalarBackend().Encode(Spec("fp32"), view, nullptr, wire.data());
          std::vector<float> got(values.size());
          ScalarBackend().Decode(Spec("fp32"), wire.data(), View(got));
          for (size_t i = 0; i < got.size(); ++i) {
            const float expected = op == Op::kSum ? 3 * values[i] : values[i];
            // The sum's blocks have a scale of 3 or more: half a step is lost. bf16 keeps 8 bits.
            ASSERT_NEAR(got[i], expected, op == Op::kSum ? 2.6f : 0.51f)
                << "rank " << rank << " " << Name(dtype) << " " << i;
          }
        }
      });
    }
  }
}

// A NaN or Inf becomes NaN in its block on every rank, and leaves no trace in later steps.
TEST(EngineInProcess, NonFiniteValuesReachEveryRankAndLeaveNoTrace) {
  ExpectNonFiniteLeavesNoTrace(3, SmallChunks("int4"));
}

}  // namespace
}  // namespace thinwire
