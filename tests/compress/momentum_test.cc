// The engine's momentum around an exchange: the SIMD backend does in one pass what the scalar
// reference does in several.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compress/target_test.h"
#include "tests/compress/values.h"

namespace thinwire {
namespace {

constexpr float kBeta = 0.9f;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr size_t kSizes[] = {0, 1, 255, 4096, 4097, 10001};  // around the ends of stages and blocks

// Returns `values` stored as `dtype`.
std::vector<uint8_t> Stored(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
  ScalarBackend().Decode(Spec("fp32"), reinterpret_cast<const uint8_t*>(values.data()),
                         {bytes.data(), values.size(), dtype});
  return bytes;
}

std::string Named(const std::string& what, DType dtype, size_t numel) {
  return what + ", " + std::string(Name(dtype)) + ", " + std::to_string(numel);
}

TEST_P(TargetTest, MomentumIsEncodedInTheGradientsPlace) {
  for (const char* text : {"fp32", "bf16", "int8", "int4", "int4:rounding=stochastic",
                           "int4:hadamard=1", "onebit", "adaptive"}) {
    const CodecSpec spec = Spec(text);
    for (const DType dtype : kDTypes) {
      for (const size_t numel : kSizes) {
        std::vector<uint8_t> gradient = Stored(Values(numel, kSeed + numel), dtype);
        std::vector<float> velocity = Residuals(numel, 9);
        std::vector<float> r1 = Residuals(numel, 5), r2 = r1;
        std::vector<uint8_t> w1(EncodedBytes(spec, numel)), w2 = w1;
        EncodeArgs args{.gradient = {gradient.data(), numel, dtype},
                        .residual = r1.data(),
                        .wire = w1.data(),
                        .draws = {kSeed, 3, 256},
                        .momentum = {kBeta, false, velocity.data()}};
        CpuBackend().EncodeAll(spec, {&args, 1});
        args.residual = r2.data();
        args.wire = w2.data();
        ScalarBackend().EncodeAll(spec, {&args, 1});
        if (spec.traits().uses_feedback()) {  // without feedback NaN payloads differ
          ASSERT_EQ(w1, w2) << Named(text, dtype, numel);
        }
        ASSERT_TRUE(SameBits(r1.data(), r2.data(), numel * 4)) << Named(text, dtype, numel);
      }
    }
  }
}

TEST_P(TargetTest, MomentumBeginsInMemoryOfItsOwnOrTheVelocitys) {
  for (const DType dtype : kDTypes) {
    for (const size_t numel : kSizes) {
      std::vector<uint8_t> gradient = Stored(Values(numel, kSeed + numel), dtype);
      const TensorView g{gradient.data(), numel, dtype};
      std::vector<float> velocity = Residuals(numel, 9), own(numel), expected(numel);
      ScalarBackend().Accumulate(g, kBeta, velocity, expected);
      CpuBackend().Accumulate(g, kBeta, velocity, own);
      ExpectSameFloats(own.data(), expected.data(), numel, Named("own", dtype, numel));
      CpuBackend().Accumulate(g, kBeta, velocity, velocity);
      ExpectSameFloats(velocity.data(), expected.data(), numel, Named("sum", dtype, numel));
    }
  }
}

TEST_P(TargetTest, MomentumEndsWithWhatTheOptimizerApplies) {
  for (const bool nesterov : {false, true}) {
    for (const DType dtype : kDTypes) {
      for (const size_t numel : kSizes) {
        std::vector<float> m1 = Values(numel, kSeed + numel), m2 = m1;
        std::vector<float> v1 = Residuals(numel, 9), v2 = v1;
        std::vector<uint8_t> out1(numel * SizeOf(dtype)), out2 = out1;
        CpuBackend().EndMomentum({kBeta, nesterov, v1.data()}, m1, {out1.data(), numel, dtype});
        ScalarBackend().EndMomentum({kBeta, nesterov, v2.data()}, m2, {out2.data(), numel, dtype});
        const std::string what = Named(nesterov ? "Nesterov" : "plain", dtype, numel);
        ASSERT_TRUE(SameBits(v1.data(), v2.data(), numel * 4)) << what;
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

}  // namespace
}  // namespace thinwire
