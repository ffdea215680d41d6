// Error feedback is exact bookkeeping: what was sent and what is kept add up to what came in,
// element by element, over all hops, for every codec, flat, in a grid and by nodes.
#include <algorithm>
#include <cctype>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "compress/codec_list.h"
#include "tests/effort.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

struct Case {
  std::string codec;
  Topology topology;
  int world;
  int local_size = 0;
};

class FeedbackTest : public testing::TestWithParam<Case> {};

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  std::string name = info.param.codec;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return absl::StrCat(std::string(Name(info.param.topology)), info.param.world, name);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* codec : {"int8", "int4", "onebit", "onebit:down=onebit", "topk:density=0.03",
                            "int4:hadamard=1", "int8:rounding=stochastic", "int8:down=onebit"}) {
    cases.push_back({codec, Topology::kFlat, 3});
  }
  for (const char* codec : {"int4", "onebit:down=onebit", "int8:rounding=stochastic"}) {
    cases.push_back({codec, Topology::kGrid, 6});
    cases.push_back({codec, Topology::kHierarchical, 6, 2});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, FeedbackTest, testing::ValuesIn(Cases()), CaseName);

// Sent and kept values add up to those that came in: nothing is lost, over all hops, also when
// the parameters move into other buckets half-way.
TEST_P(FeedbackTest, LosesNothingEvenWhenBucketsAreRebuilt) {
  constexpr int kSteps = Rounds(100);
  const int world = GetParam().world;
  Options options = SmallChunks(GetParam().codec);
  options.topology = GetParam().topology;
  options.local_size = GetParam().local_size;
  constexpr size_t kA = 1500, kB = 2700, kC = 900;
  std::vector<double> sent(kA + kB + kC), given(kA + kB + kC), kept(kA + kB + kC);
  std::mutex mu;
  RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
    const auto reduce = [&](std::vector<float> values, const std::string& key,
                            std::vector<Segment> segments, std::vector<size_t> places) {
      {
        const std::lock_guard lock(mu);
        size_t i = 0;
        for (size_t s = 0; s < segments.size(); ++s) {
          for (size_t j = 0; j < segments[s].count; ++j) given[places[s] + j] += values[i++];
        }
      }
      auto work = engine.Start(
          {.input = View(values), .output = View(values), .key = key, .segments = segments});
      ASSERT_TRUE(work.ok()) << work.status();
      ASSERT_TRUE((*work)->Wait().ok());
      if (rank != 0) return;
      size_t i = 0;
      for (size_t s = 0; s < segments.size(); ++s) {
        for (size_t j = 0; j < segments[s].count; ++j)
          sent[places[s] + j] += world * double{values[i++]};
      }
    };
    for (int step = 0; step < kSteps; ++step) {
      if (step < kSteps / 2) {
        reduce(Gradient(kA + kB, 7, rank, step), "bucket0",
               {{"a", 0, kA, kA, 0}, {"b", 0, kB, kB, 0}}, {0, kA});
        reduce(Gradient(kC, 8, rank, step), "bucket1", {{"c", 0, kC, kC, 0}}, {kA + kB});
      } else {
        reduce(Gradient(kC + kB, 7, rank, step), "bucket0",
               {{"c", 0, kC, kC, 0}, {"b", 0, kB, kB, 0}}, {kA + kB, kA});
        reduce(Gradient(kA, 8, rank, step), "bucket1", {{"a", 0, kA, kA, 0}}, {0});
      }
    }
    const std::lock_guard lock(mu);
    const std::pair<std::string, size_t> parameters[] = {{"a", 0}, {"b", kA}, {"c", kA + kB}};
    for (const auto& [name, place] : parameters) {
      ParameterResidual residual;
      ASSERT_TRUE(engine.error_feedback().Export(name, &residual).ok());
      for (size_t i = 0; i < residual.first.size(); ++i) {
        kept[place + i] += residual.first[i] + world * double{residual.second[i]};
      }
    }
  });
  for (size_t i = 0; i < sent.size(); ++i) {
    // Rounding of 100 fp32 sums: of 1e-3, and of what topk keeps for a while.
    ASSERT_NEAR(sent[i] + kept[i], given[i], 2e-6) << i;
  }
}

}  // namespace
}  // namespace thinwire
