// Reduce-scatters, all-gathers and all-to-alls: exact sums, exact residuals, the same bits on all
// ranks, and typed errors for codecs and calls without such a collective.
#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "tests/schedule/ahead_plane.h"
#include "tests/schedule/ranks.h"

namespace thinwire {
namespace {

absl::Status Perform(Engine& engine, Collective collective, TensorView input, TensorView output,
                     const std::string& key = "g", Op op = Op::kMean,
                     std::span<const Segment> segments = {}) {
  auto work = engine.Start({.input = input,
                            .output = output,
                            .key = key,
                            .segments = segments,
                            .op = op,
                            .collective = collective});
  return work.ok() ? (*work)->Wait() : work.status();
}

// Elements of a rank's part: chunks of one and of several blocks, and borders inside a block.
constexpr size_t kParts[] = {1, 3, 255, 256, 257, 1000, 3001, 4096};

TEST(ReduceScatter, IsThePlainSumInRankOrder) {
  for (int world = 1; world <= 4; ++world) {
    RunRanks(Wire::kInProcess, world, SmallChunks("fp32"), [&](int rank, Engine& engine) {
      for (const size_t part : kParts) {
        for (const Op op : {Op::kSum, Op::kMean}) {
          std::vector<float> expected(part);
          for (int r = 0; r < world; ++r) {
            const std::vector<float> theirs = Gradient(part * world, part, r, 0);
            for (size_t i = 0; i < part; ++i) {
              const float x = theirs[rank * part + i];
              expected[i] = r == 0 ? x : expected[i] + x;
            }
          }
          const float scale = op == Op::kMean ? 1.0f / static_cast<float>(world) : 1.0f;
          for (float& x : expected) x *= scale;
          std::vector<float> input = Gradient(part * world, part, rank, 0), output(part);
          const std::vector<float> before = input;
          const std::string key = std::to_string(part) + (op == Op::kSum ? "sum" : "mean");
          ASSERT_TRUE(
              Perform(engine, Collective::kReduceScatter, View(input), View(output), key, op).ok())
              << engine.status();
          ASSERT_TRUE(output == expected) << "world " << world << ", rank " << rank << ", " << key;
          ASSERT_TRUE(input == before) << "the input is the caller's";
        }
      }
    });
  }
}

TEST(AllToAll, IsACopyOfEachRanksPartWhateverTheCodec) {
  for (const char* const codec : {"fp32", "int4"}) {
    for (int world = 1; world <= 4; ++world) {
      RunRanks(Wire::kInProcess, world, SmallChunks(codec), [&](int rank, Engine& engine) {
        for (const size_t part : kParts) {
          std::vector<float> expected(part * world);
          for (int r = 0; r < world; ++r) {
            const std::vector<float> theirs = Gradient(part * world, part, r, 0);
            std::copy_n(theirs.begin() + rank * part, part, expected.begin() + r * part);
          }
          std::vector<float> input = Gradient(part * world, part, rank, 0), output(part * world);
          const std::vector<float> before = input;
          const std::string key = std::to_string(part);
          ASSERT_TRUE(Perform(engine, Collective::kAllToAll, View(input), View(output), key).ok())
              << engine.status();
          ASSERT_TRUE(output == expected) << "world " << world << ", rank " << rank << ", " << key;
          ASSERT_TRUE(input == before) << "the input is the caller's";
        }
      });
    }
  }
}

TEST(AllToAll, OfABufferInPlaceOrOfNoWholePartsIsRefused) {
  RunRanks(Wire::kInProcess, 2, SmallChunks("fp32"), [&](int, Engine& engine) {
    std::vector<float> even(1000), odd(1001), output(1000), longer(1001);
    const absl::Status same =
        Perform(engine, Collective::kAllToAll, View(even), View(even), "same");
    EXPECT_EQ(same.code(), absl::StatusCode::kInvalidArgument) << same;
    const absl::Status parts =
        Perform(engine, Collective::kAllToAll, View(odd), View(longer), "odd");
    EXPECT_EQ(parts.code(), absl::StatusCode::kInvalidArgument) << parts;
    EXPECT_TRUE(Perform(engine, Collective::kAllToAll, View(even), View(output), "fine").ok());
  });
}

// A rank's own elements may lie in place among those of all ranks, as with NCCL.
TEST(Scatter, InPlaceGivesTheSameBits) {
  constexpr size_t kPart = 3001;
  RunRanks(Wire::kInProcess, 3, SmallChunks("int4"), [&](int rank, Engine& engine) {
    std::vector<float> own(kPart), all(3 * kPart), in_place(3 * kPart);
    for (size_t i = 0; i < kPart; ++i) own[i] = static_cast<float>((i * 7919 + rank) % 1000);
    std::copy(own.begin(), own.end(), in_place.begin() + rank * kPart);
    const TensorView place = {in_place.data() + rank * kPart, kPart};
    ASSERT_TRUE(Perform(engine, Collective::kAllGather, View(own), View(all), "g").ok());
    ASSERT_TRUE(Perform(engine, Collective::kAllGather, place, View(in_place), "h").ok());
    EXPECT_EQ(all, in_place);
    ASSERT_TRUE(Perform(engine, Collective::kReduceScatter, View(all), View(own), "s").ok());
    ASSERT_TRUE(Perform(engine, Collective::kReduceScatter, View(in_place), place, "t").ok());
    EXPECT_EQ(own, std::vector<float>(in_place.begin() + rank * kPart,
                                      in_place.begin() + (rank + 1) * kPart));
  });
}

TEST(AllGather, OfFp32IsACopyInRankOrder) {
  for (int world = 1; world <= 4; ++world) {
    RunRanks(Wire::kInProcess, world, SmallChunks("fp32"), [&](int rank, Engine& engine) {
      for (const size_t part : kParts) {
        std::vector<float> expected, input = Gradient(part, part, rank, 0), output(part * world);
        for (int r = 0; r < world; ++r) {
          const std::vector<float> theirs = Gradient(part, part, r, 0);
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        const std::string key = std::to_string(part);
        ASSERT_TRUE(Perform(engine, Collective::kAllGather, View(input), View(output), key).ok());
        ASSERT_TRUE(output == expected) << "world " << world << ", rank " << rank << ", " << key;
      }
    });
  }
}

// The values that ranks sent plus their residuals add up to the input, element by element.
TEST(ReduceScatter, LosesNothing) {
  constexpr int kWorld = 3, kSteps = 20;
  constexpr size_t kPart = 2500, kNumel = kPart * kWorld;
  for (const char* codec : {"int8", "int4", "int4:rounding=stochastic"}) {
    for (const Op op : {Op::kMean, Op::kSum}) {
      std::vector<double> given(kNumel), got(kNumel), kept(kNumel);
      std::mutex mu;
      RunRanks(Wire::kInProcess, kWorld, SmallChunks(codec), [&](int rank, Engine& engine) {
        const double ranks = op == Op::kMean ? kWorld : 1;
        for (int step = 0; step < kSteps; ++step) {
          std::vector<float> input = Gradient(kNumel, 1, rank, step), output(kPart);
          ASSERT_TRUE(
              Perform(engine, Collective::kReduceScatter, View(input), View(output), "g", op).ok());
          const std::lock_guard lock(mu);
          for (size_t i = 0; i < kNumel; ++i) given[i] += input[i];
          for (size_t i = 0; i < kPart; ++i) got[rank * kPart + i] += ranks * double{output[i]};
        }
        const std::lock_guard lock(mu);
        ParameterResidual residual;
        ASSERT_TRUE(engine.error_feedback().Export("g", &residual).ok());
        for (size_t i = 0; i < kNumel; ++i) kept[i] += residual.first[i];
        EXPECT_EQ(residual.second, std::vector<float>(kNumel)) << "there is no second hop";
        // A rank's own part enters the sum as it is.
        for (size_t i = 0; i < kPart; ++i) ASSERT_EQ(residual.first[rank * kPart + i], 0.0f) << i;
      });
      double largest = 0.0;
      for (size_t i = 0; i < kNumel; ++i) {
        ASSERT_NEAR(got[i] + kept[i], given[i], 1e-6) << codec << " at " << i;
        largest = std::max(largest, std::abs(kept[i]));
      }
      EXPECT_GT(largest, 1e-6) << "the test would show nothing";
    }
  }
}

// A rank gets its own elements as all others get them, and later steps bring what was lost.
TEST(AllGather, GivesAllRanksTheSameBitsAndLosesNothing) {
  constexpr int kWorld = 3, kSteps = 20;
  constexpr size_t kPart = 2500;
  for (const char* codec : {"int8", "int4", "onebit"}) {
    std::vector<std::vector<float>> results[kWorld];
    RunRanks(Wire::kInProcess, kWorld, SmallChunks(codec), [&](int rank, Engine& engine) {
      std::vector<double> given(kPart), got(kPart);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<float> input = Gradient(kPart, 2, rank, step), output(kPart * kWorld);
        ASSERT_TRUE(Perform(engine, Collective::kAllGather, View(input), View(output)).ok());
        for (size_t i = 0; i < kPart; ++i) {
          given[i] += input[i];
          got[i] += output[rank * kPart + i];
        }
        results[rank].push_back(output);
      }
      ParameterResidual residual;
      ASSERT_TRUE(engine.error_feedback().Export("g", &residual).ok());
      for (size_t i = 0; i < kPart; ++i) {
        const double kept = double{residual.first[i]} + residual.second[i];
        ASSERT_NEAR(got[i] + kept, given[i], 1e-6) << codec << ", rank " << rank << " at " << i;
      }
    });
    for (int r = 1; r < kWorld; ++r) EXPECT_TRUE(results[r] == results[0]) << codec << ", " << r;
  }
}

// Small whole numbers and their sums are exact in every dtype.
TEST(Scatter, HalfPrecisionGoesBothWays) {
  constexpr size_t kPart = 1500;
  for (const char* codec : {"fp32", "bf16"}) {
    for (const auto& [dtype, one] :
         {std::pair{DType::kBF16, uint16_t{0x3f80}}, std::pair{DType::kF16, uint16_t{0x3c00}}}) {
      const uint16_t two = 0x4000;  // in both types
      RunRanks(
          Wire::kInProcess, 2, SmallChunks(codec),
          [&, dtype = dtype, one = one](int rank, Engine& engine) {
            // Both ranks have 1 in the second part, and only rank 0 in the first.
            std::vector<uint16_t> input(2 * kPart), part(kPart), all(2 * kPart);
            for (size_t i = 0; i < 2 * kPart; ++i) input[i] = rank == 0 || i >= kPart ? one : 0;
            const TensorView in{input.data(), input.size(), dtype}, out{part.data(), kPart, dtype},
                gathered{all.data(), all.size(), dtype};
            ASSERT_TRUE(Perform(engine, Collective::kReduceScatter, in, out, "r", Op::kSum).ok());
            EXPECT_EQ(part, std::vector<uint16_t>(kPart, rank == 0 ? one : two));
            ASSERT_TRUE(Perform(engine, Collective::kAllGather, out, gathered, "a").ok());
            std::vector<uint16_t> expected(kPart, one);
            expected.resize(2 * kPart, two);
            EXPECT_EQ(all, expected) << codec << ", " << Name(dtype);
          });
    }
  }
}

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find(words), absl::string_view::npos) << status;
}

TEST(Scatter, WhatHasNoSuchCollectiveIsRefused) {
  Options options = SmallChunks("int4");
  options.codecs.push_back(*CodecPair::Parse("fp32"));
  options.codecs.push_back(*CodecPair::Parse("topk:density=0.01"));
  RunRanks(Wire::kInProcess, 2, options, [](int, Engine& engine) {
    std::vector<float> in(101), out(202), half(50);
    const TensorView even = View(in).Slice(0, 100);
    const auto scatter = Collective::kReduceScatter, gather = Collective::kAllGather;
    ExpectRefused(Perform(engine, scatter, View(in), View(half)),
                  "expected a multiple of the ranks");
    ExpectRefused(Perform(engine, scatter, even, View(in)), "the output has 101");
    ExpectRefused(Perform(engine, gather, even, even), "expected 200");
    const std::vector<Segment> two = {{"a", 0, 50, 50, 0}, {"b", 0, 50, 50, 1}};
    const std::vector<Segment> topk = {{"a", 0, 100, 100, 2}};
    for (const Collective collective : {scatter, gather}) {
      const TensorView result = collective == scatter ? View(half) : View(out).Slice(0, 200);
      ExpectRefused(Perform(engine, collective, even, result, "g", Op::kMean, two),
                    "several codecs");
      ExpectRefused(Perform(engine, collective, even, result, "g", Op::kMean, topk), "entries");
      const uint32_t absent[] = {0};
      ExpectRefused(engine
                        .Start({.input = even,
                                .output = result,
                                .key = "g",
                                .absent = absent,
                                .collective = collective})
                        .status(),
                    "absent segments go with an allreduce");
      EXPECT_TRUE(Perform(engine, collective, even, result).ok()) << "and the group goes on";
    }
  });
  options = SmallChunks("int4");
  options.momentum.beta = 0.9f;
  RunRanks(Wire::kInProcess, 2, options, [](int, Engine& engine) {
    std::vector<float> in(100), half(50);
    ExpectRefused(Perform(engine, Collective::kReduceScatter, View(in), View(half)), "momentum");
  });
}

TEST(Scatter, AnotherCollectiveOnOneRankIsATypedErrorEverywhere) {
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    RunRanks(wire, 3, SmallChunks("int4"), [](int rank, Engine& engine) {
      std::vector<float> in(3000), part(1000), all(9000);
      const absl::Status status =
          rank == 1 ? Perform(engine, Collective::kAllGather, View(in), View(all))
                    : Perform(engine, Collective::kReduceScatter, View(in), View(part));
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      for (const char* word : {"'g'", "rank 1", "reduce-scatter", "all-gather"}) {
        EXPECT_NE(status.message().find(word), absl::string_view::npos) << status;
      }
    });
  }
}

// A receive that is started before the codec's work saves a latency. Values sent as they are would
// only be copied early, when the processor should be adding.
TEST(Collectives, ReceiveAheadWhereTheCodecWorks) {
  constexpr size_t kPart = 3000;
  for (const auto& [codec, topology, ahead] :
       {std::tuple("int4", Topology::kFlat, true), std::tuple("int4", Topology::kGrid, true),
        std::tuple("topk:density=0.1", Topology::kFlat, true),
        std::tuple("fp32", Topology::kFlat, false)}) {
    for (const Collective collective :
         {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
      if (collective != Collective::kAllReduce && std::string(codec).starts_with("topk")) continue;
      SCOPED_TRACE(std::string(codec) + " " + std::to_string(static_cast<int>(collective)));
      Options options = SmallChunks(codec);
      options.topology = topology;
      AheadCounts counts;
      std::vector<Transport> transports = Connect(Wire::kInProcess, 4);
      for (Transport& transport : transports) {
        transport.data = std::make_unique<AheadPlane>(std::move(transport.data), counts);
      }
      RunRanks(std::move(transports), options, [&](int, Engine& engine) {
        const size_t in = collective == Collective::kAllGather ? kPart : 4 * kPart;
        const size_t out = collective == Collective::kReduceScatter ? kPart : 4 * kPart;
        std::vector<float> input(in, 1.0f), output(out);
        ASSERT_TRUE(Perform(engine, collective, View(input), View(output)).ok());
      });
      EXPECT_GT(ahead ? counts.expected : counts.started, 0);
      EXPECT_EQ(ahead ? counts.started : counts.expected, 0);
    }
  }
}

// A plane that gets failures from another plane may not know of one yet. It would take an exchange
// that is dropped as the first reason.
TEST(Collectives, AnExchangeBegunAheadOfOneThatFailsIsWaitedFor) {
  AheadCounts counts{.fails = true};
  std::vector<Transport> transports = Connect(Wire::kInProcess, 2);
  for (Transport& transport : transports) {
    transport.data = std::make_unique<AheadPlane>(std::move(transport.data), counts);
  }
  RunRanks(std::move(transports), SmallChunks("int4"), [](int, Engine& engine) {
    std::vector<float> values(6000, 1.0f);
    const absl::Status status = Perform(engine, Collective::kAllReduce, View(values), View(values));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  });
  EXPECT_GT(counts.expected, 1);
  EXPECT_EQ(counts.dropped, 0);
}

}  // namespace
}  // namespace thinwire
