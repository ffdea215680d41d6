// adaptive's kernels, in which a shard's blocks depend on each other: bytes, residuals and values
// are the scalar reference's. kernel_test.cc covers every length, dtype and reduction.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/compress/values.h"
#include "tests/kernels/devices.h"

namespace thinwire {
namespace {

constexpr size_t kBlock = 256;
constexpr const char* kAdaptive[] = {"adaptive:bits=0.5", "adaptive:bits=1,floor=1",
                                     "adaptive:bits=2.5", "adaptive:bits=6,floor=2,seed=3"};

class WidthsKernelTest : public KernelsOnDevice {
 protected:
  // Encodes with feedback, then decodes the result.
  void Check(const std::string& text, std::vector<float> gradient) {
    SCOPED_TRACE(text + " of " + std::to_string(gradient.size()));
    const CodecSpec spec = *CodecSpec::Parse(text);
    const size_t numel = gradient.size();
    std::vector<float> residual(numel), values(numel);
    for (size_t i = 0; i < numel; ++i) residual[i] = gradient[numel - 1 - i] * 0x1p-3f;
    for (float& r : residual) r = IsFinite(r) ? r : 0.0f;
    std::vector<uint8_t> wire(EncodedBytes(spec, numel));
    OnDevice g(*device_, *stream_, numel * 4, 0, gradient.data());
    OnDevice r(*device_, *stream_, numel * 4, 0, residual.data());
    OnDevice w(*device_, *stream_, wire.size()), v(*device_, *stream_, numel * 4);

    ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
    ScalarBackend().Decode(spec, wire.data(), {values.data(), numel});
    stream_->backend().Encode(spec, {g.data(), numel}, r.floats(), w.data());
    stream_->backend().Decode(spec, w.data(), {v.data(), numel});
    ASSERT_EQ(w.Read(), wire);
    ASSERT_EQ(r.Read(), Stored(residual, DType::kF32)) << "residuals";
    ASSERT_EQ(v.Read(), Stored(values, DType::kF32)) << "values";
  }
};
INSTANTIATE_TEST_SUITE_P(On, WidthsKernelTest, testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

// All heads are equal, so the threshold leaves bits over, which the first blocks get.
TEST_P(WidthsKernelTest, EqualBlocksShareWhatIsLeft) {
  for (const char* spec : kAdaptive) {
    for (const size_t blocks : {1, 2, 15, 16, 17, 255, 257, 4200}) {
      std::vector<float> gradient(blocks * kBlock - 3);
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = i % 3 == 0 ? -1.5f : 1.0f;
      Check(spec, std::move(gradient));
      if (HasFatalFailure()) return;
    }
  }
}

// As many tiles as the planning team has threads, and more.
TEST_P(WidthsKernelTest, ManyTiles) {
  for (const size_t numel : {65535, 65536, 65537, 257 * 4096 + 5}) {
    Check("adaptive", Values(numel, numel));
    if (HasFatalFailure()) return;
  }
  Check("adaptive:bits=4.3125,floor=1", Values(65537, 1));
}

// Bytes that no block can use are zero, wherever they are.
TEST_P(WidthsKernelTest, FewBlocksHaveCodes) {
  for (const char* spec : kAdaptive) {
    for (const float other : {0.0f, 0x1p-120f, INFINITY, NAN, 0x1p127f}) {
      std::vector<float> gradient(90 * kBlock + 7, other);
      for (size_t i = 40 * kBlock; i < 41 * kBlock; ++i) gradient[i] = std::sin(0.1f * i);
      Check(spec, gradient);
      Check(spec, std::vector<float>(gradient.size(), other));
      if (HasFatalFailure()) return;
    }
  }
}

// Magnitudes around which squares underflow or overflow, and heads become tiny or not finite.
TEST_P(WidthsKernelTest, EveryMagnitude) {
  std::vector<float> gradient;
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (size_t i = 0; i < kBlock; ++i) {
      gradient.push_back(std::ldexp(i % 2 == 0 ? 1.0f : -0.75f, exponent));
    }
  }
  for (const char* spec : kAdaptive) Check(spec, gradient);
}

// A decoder takes any heads. (An encoder makes few of them.)
TEST_P(WidthsKernelTest, AnyBytesDecode) {
  std::mt19937 random(7);
  for (const char* text : kAdaptive) {
    const CodecSpec spec = *CodecSpec::Parse(text);
    const size_t numel = 70 * kBlock + 9;
    std::vector<uint8_t> wire(EncodedBytes(spec, numel));
    for (uint8_t& byte : wire) byte = static_cast<uint8_t>(random());
    std::vector<float> values(numel);
    OnDevice w(*device_, *stream_, wire.size(), 0, wire.data());
    OnDevice v(*device_, *stream_, numel * 4);
    ScalarBackend().Decode(spec, wire.data(), {values.data(), numel});
    stream_->backend().Decode(spec, w.data(), {v.data(), numel});
    ASSERT_EQ(v.Read(), Stored(values, DType::kF32)) << text;
  }
}

}  // namespace
}  // namespace thinwire
