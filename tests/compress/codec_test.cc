// The SIMD backend gives the scalar reference's bytes, residuals and values on every instruction
// set, and both keep the rules of FORMAT.md.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "compress/backend.h"
#include "compress/codec_list.h"
#include "compress/half_float.h"
#include "compress/simd_target.h"
#include "tests/compress/values.h"
#include "tests/effort.h"

namespace thinwire {
namespace {

constexpr uint64_t kSeed = 20240607;

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

// Memory that begins `skew` bytes behind an aligned address.
class Skewed {
 public:
  Skewed(size_t bytes, size_t skew) : memory_(bytes + 128), skew_(skew) {}
  uint8_t* data() {
    return memory_.data() + 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64 + skew_;
  }
  float* floats() { return reinterpret_cast<float*>(data()); }

 private:
  std::vector<uint8_t> memory_;
  size_t skew_;
};

// To any alignment.
void Copy(const std::vector<float>& from, uint8_t* to) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from.data());
  std::copy(bytes, bytes + from.size() * sizeof(float), to);
}

bool SameBits(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

// NaNs may differ in their payload, everything else not.
void ExpectSameFloats(const float* got, const float* want, size_t n, const std::string& what) {
  for (size_t i = 0; i < n; ++i) {
    float a, b;
    std::memcpy(&a, got + i, 4);
    std::memcpy(&b, want + i, 4);
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_EQ(BitsOf(a), BitsOf(b)) << what << ", element " << i << ": " << a << " against " << b;
  }
}

class TargetTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ForceSimdTarget(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Simd, TargetTest, testing::ValuesIn(SimdTargets()),
                         [](const auto& info) { return info.param; });

void CheckEncode(const CodecSpec& spec, size_t numel, DType dtype, bool feedback, size_t skew) {
  const std::string what = spec.ToString() + " " + std::string(Name(dtype)) + " of " +
                           std::to_string(numel) + ", feedback " + std::to_string(feedback) +
                           ", skew " + std::to_string(skew);
  const std::vector<float> values = Values(numel, kSeed + numel);
  Skewed g(numel * 4, skew), r1(numel * 4, skew), r2(numel * 4, skew);
  const TensorView view{g.data(), numel, dtype};
  std::vector<uint8_t> plain(EncodedBytes(Spec("fp32"), numel));
  ScalarBackend().Encode(Spec("fp32"), {const_cast<float*>(values.data()), numel}, nullptr,
                         plain.data());
  ScalarBackend().Decode(Spec("fp32"), plain.data(), view);
  const std::vector<float> residual = Residuals(numel, numel);
  Copy(residual, r1.data());
  Copy(residual, r2.data());
  EncodeExtras extras;
  extras.draws = {kSeed, numel, spec.block * (numel % 3)};
  const size_t bytes = EncodedBytes(spec, numel);
  Skewed fast(bytes, skew), slow(bytes, skew);
  std::memset(fast.data(), 0xAA, bytes);  // padding must be written, too
  CpuBackend().Encode(spec, view, feedback ? r1.floats() : nullptr, fast.data(), extras);
  ScalarBackend().Encode(spec, view, feedback ? r2.floats() : nullptr, slow.data(), extras);
  ASSERT_TRUE(CheckWire(spec, {slow.data(), bytes}, numel).ok()) << what;
  ASSERT_TRUE(SameBits(fast.data(), slow.data(), bytes)) << what;
  ASSERT_TRUE(SameBits(r1.data(), r2.data(), numel * 4)) << what << ", residuals";

  Skewed out1(numel * 4, skew), out2(numel * 4, skew);
  CpuBackend().Decode(spec, slow.data(), {out1.data(), numel});
  ScalarBackend().Decode(spec, slow.data(), {out2.data(), numel});
  ExpectSameFloats(out1.floats(), out2.floats(), numel, what + ", decode");
  Copy(residual, out1.data());
  Copy(residual, out2.data());
  CpuBackend().DecodeAdd(spec, slow.data(), {out1.floats(), numel});
  ScalarBackend().DecodeAdd(spec, slow.data(), {out2.floats(), numel});
  ExpectSameFloats(out1.floats(), out2.floats(), numel, what + ", decode-add");
}

TEST_P(TargetTest, EveryLengthFrom0To4097) {
  for (const CodecTraits& codec : kCodecs) {
    for (size_t numel = 0; numel <= 4097; numel = NextLength(numel)) {
      CheckEncode({.id = codec.id}, numel, DType::kF32, true, numel % 5);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_P(TargetTest, DTypesBlocksAndAlignments) {
  for (const char* text : {"fp32",
                           "bf16",
                           "int8",
                           "int4",
                           "int8:block=128",
                           "int4:block=128",
                           "int8:block=1024",
                           "int4:block=4096",
                           "onebit",
                           "onebit:block=128",
                           "onebit:block=4096",
                           "topk",
                           "topk:density=0.4",
                           "topk:density=1",
                           "int8:rounding=stochastic",
                           "int8:rounding=stochastic,block=128",
                           "int4:rounding=stochastic,block=1024",
                           "int4:hadamard=1",
                           "int4:rounding=stochastic,hadamard=1,seed=5",
                           "adaptive:bits=6",
                           "adaptive:bits=0.5",
                           "adaptive:bits=1.0625,floor=1",
                           "adaptive:floor=2,seed=3"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const size_t numel :
           {1, 3, 127, 128, 129, 255, 256, 257, 1000, 4096, 4097, 10007, 65536}) {
        for (const bool feedback : {false, true}) {
          CheckEncode(Spec(text), numel, dtype, feedback, (numel + feedback) % 7);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// Many random blocks of a kind that random data otherwise misses: a maximum within an ulp or two of
// where rounding the scale up matters, beside values that sit on rounding ties.
// What is decoded to an address between vectors' boundaries goes through the caches at any size.
TEST_P(TargetTest, LargeTensorsDecodePastTheCaches) {
  constexpr size_t kNumel = (size_t{32} << 20) / sizeof(float) + 300;
  const std::vector<float> some = Values(1 << 14, kSeed);
  std::vector<float> g(kNumel);
  for (size_t i = 0; i < kNumel; ++i) g[i] = some[i % some.size()];
  for (const char* codec : {"int8", "int4", "onebit"}) {
    const CodecSpec spec = Spec(codec);
    std::vector<uint8_t> wire(EncodedBytes(spec, kNumel));
    CpuBackend().Encode(spec, {g.data(), kNumel}, nullptr, wire.data());
    Skewed past(4 * kNumel, 0), through(4 * kNumel, 4);
    CpuBackend().Decode(spec, wire.data(), {past.data(), kNumel});
    CpuBackend().Decode(spec, wire.data(), {through.data(), kNumel});
    EXPECT_TRUE(SameBits(past.data(), through.data(), 4 * kNumel)) << codec;
  }
}

TEST_P(TargetTest, DirectedBlocks) {
  std::mt19937_64 random(kSeed);
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const float qmax = static_cast<float>(spec.traits().qmax);
    for (int round = 0; round < 3000; ++round) {
      std::vector<float> g(256);
      const uint32_t exponent = 30 + random() % 190;
      const float step = FloatOf(exponent << 23 | (random() & 0x7f) << 16);
      for (float& value : g) {
        const int half_steps = static_cast<int>(random() % static_cast<uint64_t>(4 * qmax)) -
                               static_cast<int>(2 * qmax);
        value = 0.5f * static_cast<float>(half_steps) * step;
      }
      const uint32_t bits = BitsOf(qmax * step);
      g[random() % 256] = FloatOf(bits + static_cast<uint32_t>(random() % 7) - 3);
      std::vector<float> r1 = Residuals(256, round), r2;
      for (float& value : r1) value = random() % 4 == 0 ? value * step : 0.0f;
      r2 = r1;
      std::vector<uint8_t> fast(EncodedBytes(spec, 256)), slow(fast.size());
      CpuBackend().Encode(spec, {g.data(), 256}, r1.data(), fast.data());
      ScalarBackend().Encode(spec, {g.data(), 256}, r2.data(), slow.data());
      ASSERT_EQ(fast, slow) << text << ", round " << round;
      ASSERT_TRUE(SameBits(r1.data(), r2.data(), 1024)) << text << ", round " << round;
    }
  }
}

// The mean of 257 and nothing lies half-way between two bf16 values. Single summands of 2^-16 are
// lost beside 257 and pairs are not, so the order of the sum decides. Random data never gets there.
TEST_P(TargetTest, TheOrderOfOneBitsSum) {
  std::mt19937_64 random(kSeed);
  const CodecSpec spec = Spec("onebit");
  int up = 0, down = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<float> g(256);
    for (uint64_t i = random() % 40; i > 0; --i) g[random() % 256] = 0x1p-16f;
    g[random() % 256] = round % 2 ? 257.0f : -257.0f;
    std::vector<uint8_t> fast(EncodedBytes(spec, 256)), slow(fast.size());
    CpuBackend().Encode(spec, {g.data(), 256}, nullptr, fast.data());
    ScalarBackend().Encode(spec, {g.data(), 256}, nullptr, slow.data());
    ASSERT_EQ(fast, slow) << "round " << round;
    const int scale = slow[0] | slow[1] << 8;
    ASSERT_TRUE(scale == 0x3f80 || scale == 0x3f81) << scale;
    ++(scale == 0x3f80 ? down : up);
  }
  EXPECT_GT(up, 100);
  EXPECT_GT(down, 100);
}

TEST_P(TargetTest, ReduceIsSumScaleEncodeDecode) {
  for (const char* text :
       {"fp32", "bf16", "int8", "int4", "int4:block=1024", "onebit", "onebit:down=onebit",
        "int8:down=int4", "int4:hadamard=1", "int8:rounding=stochastic",
        "onebit:block=512,down=int8", "adaptive", "adaptive:bits=1,down=adaptive:bits=4",
        "int8:down=adaptive", "adaptive:down=int4"}) {
    const CodecPair pair = *CodecPair::Parse(text);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int world : {2, 3, 5}) {
        for (const size_t numel : {1, 255, 256, 300, 5000}) {
          for (int me = 0; me < world; ++me) {
            std::vector<std::vector<uint8_t>> wires(
                world, std::vector<uint8_t>(EncodedBytes(pair.up, numel)));
            std::vector<const uint8_t*> pointers(world);
            for (int r = 0; r < world; ++r) {
              std::vector<float> g = Values(numel, kSeed + r + numel);
              CpuBackend().Encode(pair.up, {g.data(), numel}, nullptr, wires[r].data());
              pointers[r] = r == me ? nullptr : wires[r].data();
            }
            std::vector<float> own_values = Values(numel, kSeed + 31 * me);
            std::vector<uint8_t> own(numel * 4), out1(numel * 4), out2(numel * 4);
            std::vector<uint8_t> plain(EncodedBytes(Spec("fp32"), numel));
            ScalarBackend().Encode(Spec("fp32"), {own_values.data(), numel}, nullptr, plain.data());
            ScalarBackend().Decode(Spec("fp32"), plain.data(), {own.data(), numel, dtype});
            std::vector<float> r1 = Residuals(numel, 5), r2 = r1;
            const bool feedback = me != 1;
            std::vector<uint8_t> w1(EncodedBytes(pair.down, numel)), w2 = w1;
            const float scale = 1.0f / static_cast<float>(world);
            ReduceArgs args{pair.up,
                            pair.down,
                            pointers,
                            {own.data(), numel, dtype},
                            scale,
                            feedback ? r1.data() : nullptr,
                            {out1.data(), numel, dtype},
                            w1.data(),
                            {kSeed, 3, 256}};
            CpuBackend().Reduce(args);
            if (feedback) args.residual = r2.data();
            args.out.data = out2.data();
            args.wire_out = w2.data();
            ScalarBackend().Reduce(args);
            const std::string what = std::string(text) + " " + std::string(Name(dtype)) +
                                     ", world " + std::to_string(world) + ", rank " +
                                     std::to_string(me) + ", " + std::to_string(numel);
            if (pair.down.traits().uses_feedback()) {  // else NaN payloads differ
              ASSERT_EQ(w1, w2) << what;
            }
            ASSERT_TRUE(SameBits(r1.data(), r2.data(), numel * 4)) << what;
            if (dtype == DType::kF32) {
              ExpectSameFloats(reinterpret_cast<float*>(out1.data()),
                               reinterpret_cast<float*>(out2.data()), numel, what);
            } else {
              ASSERT_EQ(out1, out2) << what;
            }
          }
        }
      }
    }
  }
}

// fp32 that is not encoded again, in place, as the algorithms call it.
TEST_P(TargetTest, ReduceOfVerbatimTensorsIsTheScaledSum) {
  for (const int world : {2, 3, 5}) {
    for (const size_t numel : {1, 7, 64, 300, 9000}) {
      for (int me = 0; me < world; ++me) {
        std::vector<std::vector<float>> ranks;
        std::vector<const uint8_t*> wires;
        for (int r = 0; r < world; ++r) ranks.push_back(Values(numel, kSeed + r + numel));
        for (int r = 0; r < world; ++r) {
          wires.push_back(r == me ? nullptr : reinterpret_cast<const uint8_t*>(ranks[r].data()));
        }
        std::vector<float> fast = ranks[me], slow = ranks[me];
        for (const auto& [backend, values] :
             {std::pair(&CpuBackend(), &fast), std::pair(&ScalarBackend(), &slow)}) {
          const TensorView view{values->data(), numel};
          backend->Reduce({.up = Spec("fp32"),
                           .down = Spec("fp32"),
                           .wires = wires,
                           .own = view,
                           .scale = 0.3f,
                           .out = view});
        }
        ExpectSameFloats(fast.data(), slow.data(), numel,
                         "world " + std::to_string(world) + ", " + std::to_string(numel));
      }
    }
  }
}

TEST_P(TargetTest, HalfFloatConversionsOfEveryBitPattern) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<float> fast(halves.size());
    std::vector<uint8_t> wire(EncodedBytes(Spec("fp32"), halves.size()));
    CpuBackend().Encode(Spec("fp32"), {halves.data(), halves.size(), dtype}, nullptr, wire.data());
    CpuBackend().Decode(Spec("fp32"), wire.data(), {fast.data(), fast.size()});
    std::vector<uint16_t> back(halves.size());
    CpuBackend().Decode(Spec("fp32"), wire.data(), {back.data(), back.size(), dtype});
    for (size_t i = 0; i < halves.size(); ++i) {
      const float want = dtype == DType::kBF16 ? FromBf16(halves[i]) : FromF16(halves[i]);
      ASSERT_EQ(std::isnan(fast[i]), std::isnan(want)) << i;
      if (std::isnan(want)) continue;
      ASSERT_EQ(BitsOf(fast[i]), BitsOf(want)) << i;
      ASSERT_EQ(back[i], halves[i]) << i;  // exact there and back
    }
  }
}

// g++ 12 has _Float16 in C++ on x86 only.
#ifdef __aarch64__
using CompilersHalf = __fp16;
#else
using CompilersHalf = _Float16;
#endif

// Against the compiler's own conversion, on ties and neighbours of every half.
TEST(HalfFloat, RoundsLikeTheHardwareType) {
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const float value = FromF16(static_cast<uint16_t>(half));
    ASSERT_EQ(value, static_cast<float>(std::bit_cast<CompilersHalf>(static_cast<uint16_t>(half))))
        << half;
    for (const uint32_t offset : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu}) {
      const float near = FloatOf(BitsOf(value) + offset);
      ASSERT_EQ(ToF16(near), std::bit_cast<uint16_t>(static_cast<CompilersHalf>(near)))
          << half << " " << offset;
    }
  }
}

// D(x) + r is x to the bit, wherever the block is finite: nothing is lost in a step.
TEST(ErrorFeedbackRule, DecodedPlusResidualIsTheInput) {
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const size_t numel = 100000;
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    std::vector<float> g(numel), r(numel), d(numel);
    for (float& value : g) value = normal(random);
    std::vector<uint8_t> wire(EncodedBytes(spec, numel));
    CpuBackend().Encode(spec, {g.data(), numel}, r.data(), wire.data());
    CpuBackend().Decode(spec, wire.data(), {d.data(), numel});
    for (size_t i = 0; i < numel; ++i) ASSERT_EQ(double{d[i]} + double{r[i]}, double{g[i]}) << i;
  }
}

TEST(BlockRules, TinyZeroAndNonFiniteBlocks) {
  for (const char* text : {"int8", "int4", "onebit", "int4:hadamard=1"}) {
    const CodecSpec spec = Spec(text);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    for (const float special : {0.0f, 1e-38f, 7e-31f, inf, -inf, nan, 0x1p127f}) {
      std::vector<float> g(256, 0.0f), r(256, 1e-33f), d(256);
      const bool tiny = special < 1e-30f && special > -1e-30f;
      // onebit and the transform judge a block by all its elements, so all are special there; but
      // the transform would make a larger value of many tiny ones.
      const bool all = spec.traits().qmax == 1 || (spec.hadamard && !tiny);
      if (all) std::fill(g.begin(), g.end(), special);
      g[9] = special;
      std::vector<uint8_t> wire(EncodedBytes(spec, 256));
      CpuBackend().Encode(spec, {g.data(), 256}, r.data(), wire.data());
      CpuBackend().Decode(spec, wire.data(), {d.data(), 256});
      for (size_t i = 0; i < 256; ++i) {
        ASSERT_EQ(std::isnan(d[i]), !tiny) << special;
        ASSERT_TRUE(!tiny || BitsOf(d[i]) == 0u) << "exactly +0";
        ASSERT_EQ(r[i], tiny && g[i] != 0.0f ? special + 1e-33f : 1e-33f) << special << " " << i;
      }
    }
  }
}

// m / qmax one ulp above a bf16 value: the scale is the next one up. Random data never gets there.
TEST(BlockRules, ScalesAreRoundedUpByTheLastBit) {
  for (const char* text : {"int8", "int4"}) {
    const CodecSpec spec = Spec(text);
    const float qmax = static_cast<float>(spec.traits().qmax);
    int found = 0;
    for (uint32_t upper = 0x3f80; upper < 0x3fff; ++upper) {
      const uint32_t wanted = upper << 16 | 1;
      const uint32_t around = BitsOf(FloatOf(wanted) * qmax);
      for (uint32_t bits = around - 8; bits <= around + 8; ++bits) {
        if (BitsOf(FloatOf(bits) / qmax) != wanted) continue;
        std::vector<float> g(256);
        g[17] = FloatOf(bits);
        for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
          std::vector<uint8_t> wire(EncodedBytes(spec, 256));
          backend->Encode(spec, {g.data(), 256}, nullptr, wire.data());
          ASSERT_EQ(wire[0] | wire[1] << 8, static_cast<int>(upper + 1)) << text << " " << bits;
          ++found;
        }
      }
    }
    EXPECT_GT(found, 100);
  }
}

// The order itself, so that both implementations can't change it together: beside 257 in lane 0 two
// summands count where they meet each other before they meet it.
TEST(BlockRules, OneBitsLanesAreFoldedByHalves) {
  const std::tuple<size_t, size_t, int> cases[] = {{1, 33, 0x3f81},  // one lane
                                                   {1, 17, 0x3f81},  // meet when 16 are folded
                                                   {1, 9, 0x3f81},  {1, 5, 0x3f81},
                                                   {1, 3, 0x3f81},  // when 2 are
                                                   {1, 2, 0x3f80},  // 2 meets 257 first
                                                   {2, 4, 0x3f80},  {8, 16, 0x3f80}};
  for (const auto& [first, second, scale] : cases) {
    std::vector<float> g(256);
    g[0] = 257.0f;
    g[first] = g[second] = 0x1p-16f;
    for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
      std::vector<uint8_t> wire(EncodedBytes(Spec("onebit"), 256));
      backend->Encode(Spec("onebit"), {g.data(), 256}, nullptr, wire.data());
      EXPECT_EQ(wire[0] | wire[1] << 8, scale) << first << " and " << second;
    }
  }
}

TEST(Backend, TheFastestTargetIsTheDefault) {
  EXPECT_EQ(SimdTargets().front(), (ForceSimdTarget(SimdTargets().front()), SimdTargetName()));
}

}  // namespace
}  // namespace thinwire
