// Finite values of any size: a block decodes to finite values or, if it is too large for FORMAT.md,
// to NaN. Its residuals stay finite, so such a block leaves no trace in later steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "compress/backend.h"
#include "compress/element_math.h"
#include "tests/compress/values.h"

namespace thinwire {
namespace {

constexpr size_t kNumel = 5 * 256 + 100;

enum class Shape { kSpike, kSameSign, kTransformsToSpike, kNormal };
constexpr Shape kShapes[] = {Shape::kSpike, Shape::kSameSign, Shape::kTransformsToSpike,
                             Shape::kNormal};

// Finite values, the largest of which is about `top`.
std::vector<float> Large(Shape shape, float top, uint64_t seed) {
  std::vector<float> signs(256), values = Residuals(kNumel, seed);
  TransformSigns(0, signs.data());
  for (size_t i = 0; i < kNumel; ++i) {
    float& value = values[i];
    switch (shape) {
      case Shape::kSpike: value = i % 256 == 77 ? top : 0.0f; break;
      case Shape::kSameSign: value = top; break;
      case Shape::kTransformsToSpike: value = std::copysign(top, signs[i % 256]); break;
      case Shape::kNormal: value = std::clamp(value, -1.0f, 1.0f) * top; break;
    }
  }
  return values;
}

class OverflowTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ForceSimdTarget(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Simd, OverflowTest, testing::ValuesIn(SimdTargets()),
                         [](const auto& info) { return info.param; });

struct Encoded {
  std::vector<uint8_t> wire;
  std::vector<float> residual, out;
};

Encoded Encode(const Backend& backend, const CodecSpec& spec, std::vector<float> x,
               std::vector<float> residual) {
  Encoded made{std::vector<uint8_t>(EncodedBytes(spec, kNumel)), std::move(residual),
               std::vector<float>(kNumel)};
  backend.Encode(spec, {x.data(), kNumel}, made.residual.data(), made.wire.data());
  backend.Decode(spec, made.wire.data(), {made.out.data(), kNumel});
  return made;
}

void CheckStep(const CodecSpec& spec, const std::vector<float>& x, std::vector<float>* residual) {
  const Encoded slow = Encode(ScalarBackend(), spec, x, *residual);
  const Encoded fast = Encode(CpuBackend(), spec, x, *residual);
  ASSERT_EQ(fast.wire, slow.wire);
  for (size_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(BitsOf(fast.residual[i]), BitsOf(slow.residual[i])) << i;
    ASSERT_TRUE(std::isfinite(slow.residual[i])) << i;
    ASSERT_FALSE(std::isinf(slow.out[i])) << i;
    ASSERT_EQ(std::isnan(slow.out[i]), std::isnan(slow.out[i / 256 * 256])) << i << " of its block";
    if (std::isnan(slow.out[i])) {
      ASSERT_EQ(slow.residual[i], (*residual)[i]) << i;
      ASSERT_TRUE(std::isnan(fast.out[i])) << i;
    } else {
      ASSERT_EQ(BitsOf(fast.out[i]), BitsOf(slow.out[i])) << i;
    }
  }
  *residual = slow.residual;
}

TEST_P(OverflowTest, FiniteValuesLeaveFiniteResiduals) {
  for (const char* text : {"int8", "int4", "int4:hadamard=1", "onebit", "int8:rounding=stochastic",
                           "int4:rounding=stochastic,hadamard=1"}) {
    const CodecSpec spec = *CodecSpec::Parse(text);
    for (int exponent = 110; exponent <= 127; ++exponent) {
      for (const float factor : {1.0f, 1.3f, 1.9999998f}) {
        const float top = std::ldexp(factor, exponent);
        for (const Shape shape : kShapes) {
          SCOPED_TRACE(spec.ToString() + ", shape " + std::to_string(static_cast<int>(shape)) +
                       ", top " + std::to_string(factor) + " * 2^" + std::to_string(exponent));
          std::vector<float> residual(kNumel);
          CheckStep(spec, Large(shape, top, exponent), &residual);
          CheckStep(spec, Residuals(kNumel, 1), &residual);  // then a plain step
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// FORMAT.md, "hadamard": the border, by a block whose largest transformed value is known. A single
// x among zeros makes every transformed value +-x / 16.
TEST_P(OverflowTest, TransformedBlocksAreFiniteBelowTheirBorder) {
  const CodecSpec spec = *CodecSpec::Parse("int4:hadamard=1");
  const float below = FloatOf(BitsOf(0x1p124f) - 1);
  for (const auto& [x, finite] : {std::pair{below, true}, {-below, true}, {0x1p124f, false}}) {
    const Encoded made =
        Encode(CpuBackend(), spec, Large(Shape::kSpike, x, 0), std::vector<float>(kNumel));
    EXPECT_EQ(std::isfinite(made.out[0]), finite) << x;
    EXPECT_EQ(made.wire[0] | made.wire[1] << 8, finite ? 0x79eb : 0x7fc0) << std::hex << x;
    if (finite) {
      EXPECT_NEAR(made.out[77] / x, 0.8, 0.01) << "clipped as FORMAT.md says";
    }
  }
}

}  // namespace
}  // namespace thinwire
