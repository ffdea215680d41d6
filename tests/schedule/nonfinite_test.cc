// A NaN or Inf of one rank in one step: all ranks see it in that step's result, and momentum and
// residuals are as if the affected elements had not been exchanged.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "compress/codec_list.h"
#include "tests/effort.h"
#include "tests/schedule/ranks.h"
#include "tests/schedule/reference.h"

namespace thinwire {
namespace {

constexpr size_t kNumel = 3001;
constexpr int kSteps = 6, kBadStep = 2;

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// All NaNs count as equal, since an encoding may choose among them.
bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return (std::isnan(x) && std::isnan(y)) || BitsOf(x) == BitsOf(y);
  });
}

enum class Way { kChunks, kOneHop, kRaw };

struct Case {
  const char* codec;
  bool nesterov;
  int world;
  Way way;
  float bad;
};

void PrintTo(const Case& run, std::ostream* out) {
  *out << run.codec << (run.nesterov ? ", Nesterov" : "") << ", world " << run.world
       << (run.way == Way::kRaw      ? ", raw"
           : run.way == Way::kOneHop ? ", in one hop"
                                     : "")
       << ", " << run.bad;
}

std::vector<Case> Cases() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  std::vector<Case> cases;
  for (const char* codec :
       {"fp32", "bf16", "int8", "int4", "int4:hadamard=1", "int8:rounding=stochastic", "onebit",
        "onebit:down=onebit", "topk:density=0.01", "topk:density=0.05,masking=0", "ternary"}) {
    for (const bool nesterov : {false, true}) {
      for (const int world : {1, 2, 3}) {
        for (const float bad : {nan, FloatOf(0xff800001u), inf, -inf}) {
          if (kSanitized && bad != inf) continue;
          cases.push_back({codec, nesterov, world, Way::kChunks, bad});
        }
        cases.push_back({codec, nesterov, world, Way::kRaw, nan});
        cases.push_back({codec, nesterov, world, Way::kOneHop, nan});
      }
    }
  }
  return cases;
}

// The last rank has bad values in one step, in every shard of every chunk.
std::vector<float> GradientOf(const Case& run, int rank, int step) {
  std::vector<float> values = Gradient(kNumel, 3, rank, step);
  if (step != kBadStep || rank != run.world - 1) return values;
  for (size_t i = 5; i < kNumel; i += 800) values[i] = run.bad;
  return values;
}

struct Seen {
  std::vector<std::vector<float>> results, momentum;  // by step
};

std::vector<Seen> Train(const Case& run, const Options& options) {
  std::vector<Seen> seen(run.world);
  RunRanks(Wire::kInProcess, run.world, options, [&](int rank, Engine& engine) {
    for (int step = 0; step < kSteps; ++step) {
      std::vector<float> values = GradientOf(run, rank, step);
      ASSERT_TRUE(AllReduce(engine, values, "g").ok()) << engine.status();
      ParameterResidual kept;
      ASSERT_TRUE(engine.error_feedback().Export("g", &kept).ok());
      ASSERT_TRUE(AllFinite(kept.first) && AllFinite(kept.second)) << "residuals, step " << step;
      ASSERT_TRUE(AllFinite(kept.array(kMomentum))) << "momentum, step " << step;
      seen[rank].results.push_back(values);
      seen[rank].momentum.push_back(kept.array(kMomentum));
    }
  });
  return seen;
}

class NonFiniteTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    options_ = SmallChunks(run_.codec);
    if (run_.way == Way::kRaw) options_.min_bytes = 1 << 20;
    if (run_.way == Way::kOneHop) {
      options_.chunk_bytes = 1 << 20;
      options_.min_bytes = kNumel * sizeof(float) - 1;  // too large to go raw
    }
    options_.momentum = {0.9f, run_.nesterov};
  }

  void ExpectTheReferencesBits(const std::vector<std::vector<float>>& results) {
    ReferenceAllReduce reference(run_.world, options_);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::vector<float>> gradients;
      for (int r = 0; r < run_.world; ++r) gradients.push_back(GradientOf(run_, r, step));
      const auto expected = reference.Step(gradients, 1.0f / static_cast<float>(run_.world));
      EXPECT_TRUE(Same(results[step], expected)) << "step " << step;
    }
  }

  const Case run_ = GetParam();
  Options options_;
};
INSTANTIATE_TEST_SUITE_P(Of, NonFiniteTest, testing::ValuesIn(Cases()));

TEST_P(NonFiniteTest, LeavesTheMomentumAsItWas) {
  const std::vector<Seen> seen = Train(run_, options_);
  if (HasFatalFailure()) return;
  if (run_.world > 1 && run_.way != Way::kRaw) ExpectTheReferencesBits(seen[0].results);
  const Seen& first = seen[0];
  for (const Seen& other : seen) {
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_EQ(std::memcmp(other.results[step].data(), first.results[step].data(),
                            kNumel * sizeof(float)),
                0)
          << "replicas differ in step " << step;
      ASSERT_EQ(AllFinite(first.results[step]), step != kBadStep) << "step " << step;
    }
  }
  // With topk each rank has its own momentum, except for raw tensors and in a world of one.
  const bool shared = options_.codecs[0].up.id != codecs::TopK::kTraits.id || run_.world == 1 ||
                      run_.way == Way::kRaw;
  for (int rank = shared ? 0 : run_.world - 1; rank < run_.world; ++rank) {
    const auto& momentum = seen[rank].momentum;
    for (size_t i = 0; i < kNumel; ++i) {
      if (std::isfinite(first.results[kBadStep][i])) continue;
      ASSERT_EQ(BitsOf(momentum[kBadStep][i]), BitsOf(momentum[kBadStep - 1][i])) << i;
    }
    if (!shared) continue;
    ASSERT_EQ(momentum, first.momentum) << "rank " << rank;
  }
}

}  // namespace
}  // namespace thinwire
