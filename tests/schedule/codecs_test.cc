// Momentum owned by the engine, several codecs in one bucket, and the switch to a dense codec.
#include <cmath>

#include "tests/schedule/ranks.h"
#include "tests/schedule/reference_bits.h"

namespace thinwire {
namespace {

std::vector<float> MeanOf(const std::vector<std::vector<float>>& gradients) {
  std::vector<float> mean = gradients[0];
  for (size_t r = 1; r < gradients.size(); ++r) {
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += gradients[r][i];
  }
  for (float& value : mean) value *= 1.0f / static_cast<float>(gradients.size());
  return mean;
}

TEST(Momentum, GivesTheReferencesBits) {
  for (const char* codec : {"fp32", "int4", "onebit", "onebit:down=onebit", "topk:density=0.01"}) {
    for (const bool nesterov : {false, true}) {
      for (const int world : {2, 3}) {
        Options options = SmallChunks(codec);
        options.momentum = {0.9f, nesterov};
        ExpectTheReferencesBits(Wire::kInProcess, world, options, 3001, 12);
      }
    }
  }
}

// A tensor that goes raw follows torch.optim.SGD's recursion in fp32, also in a world of one.
TEST(Momentum, OfARawTensorIsThatOfSgd) {
  for (const int world : {1, 2, 3}) {
    for (const bool nesterov : {false, true}) {
      Options options = SmallChunks("onebit");
      options.min_bytes = 1 << 20;
      options.momentum = {0.9f, nesterov};
      RunRanks(Wire::kInProcess, world, options, [&](int rank, Engine& engine) {
        std::vector<double> buffer(500);
        for (int step = 0; step < 10; ++step) {
          std::vector<std::vector<float>> gradients;
          for (int r = 0; r < world; ++r) gradients.push_back(Gradient(500, 2, r, step));
          const std::vector<float> mean = MeanOf(gradients);
          std::vector<float> values = gradients[rank];
          ASSERT_TRUE(AllReduce(engine, values, "bias").ok());
          for (size_t i = 0; i < 500; ++i) {
            buffer[i] = 0.9f * buffer[i] + mean[i];
            const double expected = nesterov ? mean[i] + 0.9f * buffer[i] : buffer[i];
            ASSERT_NEAR(values[i], expected, 1e-8) << "world " << world << ", step " << step;
          }
        }
      });
    }
  }
}

TEST(Momentum, HalfPrecisionGradientsKeepAnFp32Momentum) {
  Options options = SmallChunks("int8");
  options.momentum = {0.5f, false};
  RunRanks(Wire::kInProcess, 2, options, [&](int, Engine& engine) {
    // With a gradient of 1.0 in each step m = 2 - 2^-step. After 12 steps bf16 would round it to 2.
    std::vector<uint16_t> ones(2000, 0x3f80);
    ParameterResidual kept;
    for (int step = 0; step < 12; ++step) {
      std::vector<uint16_t> values = ones;
      const TensorView view{values.data(), values.size(), DType::kBF16};
      auto work = engine.Start({.input = view, .output = view, .key = "g"});
      ASSERT_TRUE(work.ok() && (*work)->Wait().ok());
    }
    ASSERT_TRUE(engine.error_feedback().Export("g", &kept).ok());
    for (const float m : kept.array(kMomentum)) ASSERT_NEAR(m, 2.0, 0.02);
  });
}

TEST(Momentum, NeedsANameAndTheMean) {
  Options options = SmallChunks("onebit");
  options.momentum = {0.9f, false};
  RunRanks(Wire::kInProcess, 2, options, [&](int, Engine& engine) {
    std::vector<float> values(100);
    for (const absl::Status& status :
         {AllReduce(engine, values, ""), AllReduce(engine, values, "g", Op::kSum)}) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    }
  });
}

std::vector<Segment> Mixed() {
  return {{"a", 0, 700, 700, 0}, {"b", 0, 5, 5, 1}, {"c", 0, 1900, 1900, 0}, {"d", 0, 800, 800, 2}};
}

// A bucket of several codecs gives the results of buckets with one codec each.
TEST(Codecs, SeveralInOneBucket) {
  constexpr int kWorld = 3;
  Options options = SmallChunks("int4");
  options.codecs.push_back(*CodecPair::Parse("fp32"));
  options.codecs.push_back(*CodecPair::Parse("topk:density=0.05"));
  RunRanks(Wire::kInProcess, kWorld, options, [&](int rank, Engine& engine) {
    const auto reduce = [&](std::vector<float> values, const std::string& key,
                            const std::vector<Segment>& segments) {
      auto work = engine.Start(
          {.input = View(values), .output = View(values), .key = key, .segments = segments});
      EXPECT_TRUE(work.ok() && (*work)->Wait().ok());
      return values;
    };
    for (int step = 0; step < 6; ++step) {
      const std::vector<float> g = Gradient(3405, 4, rank, step);
      const auto part = [&](size_t begin, size_t count) {
        return std::vector<float>(g.begin() + begin, g.begin() + begin + count);
      };
      std::vector<float> dense = part(0, 700), tail = part(705, 1900);
      dense.insert(dense.end(), tail.begin(), tail.end());
      const std::vector<float> mixed = reduce(g, "mixed", Mixed());
      dense = reduce(dense, "dense", {{"x", 0, 2600, 2600, 0}});
      const std::vector<float> exact = reduce(part(700, 5), "exact", {{"y", 0, 5, 5, 1}});
      const std::vector<float> sparse = reduce(part(2605, 800), "sparse", {{"z", 0, 800, 800, 2}});
      std::vector<float> together(dense.begin(), dense.begin() + 700);
      together.insert(together.end(), exact.begin(), exact.end());
      together.insert(together.end(), dense.begin() + 700, dense.end());
      together.insert(together.end(), sparse.begin(), sparse.end());
      ASSERT_EQ(mixed, together) << "rank " << rank << ", step " << step;
    }
  });
}

TEST(Codecs, RanksThatMixThemOtherwiseAreNamed) {
  Options options = SmallChunks("int4");
  options.codecs.push_back(*CodecPair::Parse("int8"));
  RunRanks(Wire::kInProcess, 2, options, [&](int rank, Engine& engine) {
    std::vector<float> values(4000);
    const std::vector<Segment> segments = {{"a", 0, 4000, 4000, rank == 0 ? 0u : 1u}};
    auto work = engine.Start(
        {.input = View(values), .output = View(values), .key = "g", .segments = segments});
    const absl::Status status = work.ok() ? (*work)->Wait() : work.status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  });
}

TEST(Codecs, UnknownOnesAreRefused) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("int4"), [&](int, Engine& engine) {
    std::vector<float> values(400);
    const std::vector<Segment> segments = {{"a", 0, 400, 400, 3}};
    const auto work = engine.Start(
        {.input = View(values), .output = View(values), .key = "g", .segments = segments});
    EXPECT_TRUE(absl::IsInvalidArgument(work.status())) << work.status();
  });
}

TEST(Codecs, TopKBecomesInt4WhereThatIsFewerBytes) {
  for (const auto& [density, becomes] :
       {std::pair("0.05", "topk:density=0.05"), std::pair("0.08", "topk:density=0.08"),
        std::pair("0.09", "int4")}) {
    RunRanks(Wire::kInProcess, 3, SmallChunks(std::string("topk:density=") + density),
             [&](int, Engine& engine) { EXPECT_EQ(engine.codecs()[0].ToString(), becomes); });
  }
}

// A run that is resumed with its step and residuals continues with the same bits.
TEST(Codecs, SetStepResumesWarmUpAndRounding) {
  for (const char* codec : {"topk:density=0.002,warmup=8", "int8:rounding=stochastic"}) {
    std::vector<float> straight, resumed;
    std::vector<ParameterResidual> kept(2);
    const auto run = [&](int from, int to, std::vector<float>* last) {
      RunRanks(Wire::kInProcess, 2, SmallChunks(codec), [&](int rank, Engine& engine) {
        if (from > 0) {
          ASSERT_TRUE(engine.error_feedback().Import("g", kept[rank]).ok());
        }
        engine.SetStep(from);
        for (int step = from; step < to; ++step) {
          std::vector<float> values = Gradient(5000, 3, rank, step);
          ASSERT_TRUE(AllReduce(engine, values, "g").ok());
          if (rank == 0) *last = values;
        }
        if (to == 5) {
          ASSERT_TRUE(engine.error_feedback().Export("g", &kept[rank]).ok());
        }
      });
    };
    run(0, 10, &straight);
    run(0, 5, &resumed);
    run(5, 10, &resumed);
    EXPECT_EQ(resumed, straight) << codec;
  }
}

}  // namespace
}  // namespace thinwire
