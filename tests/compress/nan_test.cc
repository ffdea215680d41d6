// A NaN stays a NaN, with its sign and its upper fraction bits, on every instruction set: compress/
// FORMAT.md, "bf16". The expected bits are worked out here, not by the code under test.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "compress/backend.h"
#include "tests/compress/values.h"

namespace thinwire {
namespace {

constexpr size_t kNumel = 4099;  // whole vectors of every target, and a remainder

CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

uint16_t Bf16Of(float nan) { return static_cast<uint16_t>(BitsOf(nan) >> 16 | 0x0040); }
uint16_t F16Of(float nan) {
  const uint32_t bits = BitsOf(nan);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff));
}

// All NaNs of a 16-bit type.
std::vector<uint16_t> NanHalves(DType dtype) {
  const uint16_t infinity = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  std::vector<uint16_t> halves;
  for (uint32_t half = 0; half < 0x10000; ++half) {
    if ((half & 0x7fff) > infinity) halves.push_back(static_cast<uint16_t>(half));
  }
  return halves;
}

TensorView View(std::vector<float>& values) { return {values.data(), values.size()}; }

std::vector<uint8_t> Encode(const Backend& backend, const CodecSpec& spec, TensorView values,
                            float* residual = nullptr) {
  std::vector<uint8_t> wire(EncodedBytes(spec, values.numel));
  backend.Encode(spec, values, residual, wire.data());
  return wire;
}

template <typename T>
T At(const std::vector<uint8_t>& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

class NanTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "scalar") return;
    ForceSimdTarget(GetParam());
    backend_ = &CpuBackend();
  }

  const Backend* backend_ = &ScalarBackend();
  std::vector<float> nans_ = Nans(kNumel, 20240607);
};

std::vector<std::string> Implementations() {
  std::vector<std::string> names = SimdTargets();
  names.emplace_back("scalar");
  return names;
}
INSTANTIATE_TEST_SUITE_P(On, NanTest, testing::ValuesIn(Implementations()),
                         [](const auto& info) { return info.param; });

TEST_P(NanTest, Bf16KeepsThem) {
  const std::vector<uint8_t> wire = Encode(*backend_, Spec("bf16"), View(nans_));
  std::vector<float> residual = Residuals(kNumel, 1);
  const std::vector<float> before = residual;
  const std::vector<uint8_t> fed = Encode(*backend_, Spec("bf16"), View(nans_), residual.data());
  for (size_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(At<uint16_t>(wire, i), Bf16Of(nans_[i])) << std::hex << BitsOf(nans_[i]);
    ASSERT_EQ(At<uint16_t>(fed, i), Bf16Of(nans_[i])) << std::hex << BitsOf(nans_[i]);
  }
  EXPECT_EQ(residual, before);
}

TEST_P(NanTest, Bf16DecodesThemToTheirBits) {
  std::vector<uint16_t> halves = NanHalves(DType::kBF16);
  std::vector<uint8_t> wire(EncodedBytes(Spec("bf16"), halves.size()));
  std::memcpy(wire.data(), halves.data(), halves.size() * sizeof(uint16_t));
  std::vector<float> out(halves.size()), sum(halves.size(), 1.0f);
  backend_->Decode(Spec("bf16"), wire.data(), View(out));
  backend_->DecodeAdd(Spec("bf16"), wire.data(), sum);
  for (size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(BitsOf(out[i]), uint32_t{halves[i]} << 16);
    ASSERT_EQ(BitsOf(sum[i]), (uint32_t{halves[i]} | 0x40) << 16);  // a sum is a quiet NaN
  }
}

TEST_P(NanTest, InputsOf16BitsKeepThem) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> halves = NanHalves(dtype);
    const TensorView view{halves.data(), halves.size(), dtype};
    const std::vector<uint8_t> plain = Encode(*backend_, Spec("fp32"), view);
    const std::vector<uint8_t> rounded = Encode(*backend_, Spec("bf16"), view);
    for (size_t i = 0; i < halves.size(); ++i) {
      const uint32_t half = halves[i];
      const uint32_t wanted = dtype == DType::kBF16
                                  ? half << 16
                                  : (half & 0x8000) << 16 | 0x7fc00000 | (half & 0x3ff) << 13;
      ASSERT_EQ(At<uint32_t>(plain, i), wanted) << Name(dtype) << " " << half;
      ASSERT_EQ(At<uint16_t>(rounded, i), wanted >> 16 | 0x40) << Name(dtype) << " " << half;
    }
  }
}

TEST_P(NanTest, OutputsOf16BitsKeepThem) {
  const std::vector<uint8_t> wire = Encode(*backend_, Spec("fp32"), View(nans_));
  std::vector<uint16_t> bf16(kNumel), f16(kNumel);
  backend_->Decode(Spec("fp32"), wire.data(), {bf16.data(), kNumel, DType::kBF16});
  backend_->Decode(Spec("fp32"), wire.data(), {f16.data(), kNumel, DType::kF16});
  for (size_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(bf16[i], Bf16Of(nans_[i])) << std::hex << BitsOf(nans_[i]);
    ASSERT_EQ(f16[i], F16Of(nans_[i])) << std::hex << BitsOf(nans_[i]);
  }
}

// With one NaN in each block, every decoded element is NaN.
TEST_P(NanTest, BlocksDecodeToNan) {
  for (const char* text :
       {"int8", "int4", "onebit", "int4:hadamard=1", "int8:rounding=stochastic"}) {
    const size_t numel = 256 * 300;
    std::vector<float> x = Residuals(numel, 2), residual = Residuals(numel, 3), out(numel);
    for (size_t block = 0; block < 300; ++block) x[256 * block + block * 37 % 256] = nans_[block];
    const std::vector<float> before = residual;
    const std::vector<uint8_t> wire = Encode(*backend_, Spec(text), View(x), residual.data());
    backend_->Decode(Spec(text), wire.data(), View(out));
    for (size_t i = 0; i < numel; ++i) ASSERT_TRUE(std::isnan(out[i])) << text << " " << i;
    EXPECT_EQ(residual, before) << text;
  }
}

// Scales that no encoder makes, with codes of both signs: compress/FORMAT.md, "onebit".
TEST_P(NanTest, SignsOfAnyScaleAreItsBits) {
  constexpr uint16_t kScales[] = {0x7fc0, 0xffc1, 0x7f81, 0x7f80, 0xff80, 0x0001, 0x8000, 0x3f80};
  const size_t numel = 256 * std::size(kScales) + 77;
  std::vector<float> x = Residuals(numel, 8), out(numel);
  std::vector<uint8_t> wire = Encode(*backend_, Spec("onebit"), View(x));
  std::memcpy(wire.data(), kScales, sizeof(kScales));
  backend_->Decode(Spec("onebit"), wire.data(), View(out));
  for (size_t i = 0; i < 256 * std::size(kScales); ++i) {
    const uint32_t sign = BitsOf(x[i]) & ~kAbsMask;
    ASSERT_EQ(BitsOf(out[i]), sign ^ uint32_t{kScales[i / 256]} << 16) << i;
  }
}

TEST_P(NanTest, CopyFiniteLeavesThem) {
  const float inf = std::numeric_limits<float>::infinity(), max = std::numeric_limits<float>::max();
  for (const size_t numel : {size_t{0}, size_t{1}, size_t{15}, kNumel}) {
    std::vector<float> from(nans_.begin(), nans_.begin() + numel);
    const float finite[] = {1.5f, -0.0f, max, -max, FloatOf(1)}, infinite[] = {inf, -inf};
    for (size_t i = 0; i < numel; ++i) {
      if (i * 7 % 3 == 0) from[i] = finite[i % std::size(finite)];
      if (i * 5 % 11 == 0) from[i] = infinite[i % 2];
    }
    const std::vector<float> before = Residuals(numel, 6);
    std::vector<float> to = before;
    backend_->CopyFinite(from, to);
    for (size_t i = 0; i < numel; ++i) {
      ASSERT_EQ(BitsOf(to[i]), BitsOf(std::isfinite(from[i]) ? from[i] : before[i])) << i;
    }
  }
}

TEST_P(NanTest, TopKSendsThem) {
  const CodecSpec spec = Spec("topk:density=1");
  std::vector<float> residual = Residuals(kNumel, 4), velocity = Residuals(kNumel, 5);
  const std::vector<float> residual_before = residual, velocity_before = velocity;
  std::vector<uint8_t> fed(EncodedBytes(spec, kNumel));
  backend_->Encode(spec, {.gradient = View(nans_),
                          .residual = residual.data(),
                          .wire = fed.data(),
                          .momentum = {.beta = 0.9f, .velocity = velocity.data()}});
  for (const auto& wire : {Encode(*backend_, spec, View(nans_)), fed}) {
    std::vector<float> out(kNumel);
    std::vector<uint16_t> f16(kNumel);
    backend_->Decode(spec, wire.data(), View(out));
    backend_->Decode(spec, wire.data(), {f16.data(), kNumel, DType::kF16});
    for (size_t i = 0; i < kNumel; ++i) {
      ASSERT_EQ(BitsOf(out[i]), uint32_t{Bf16Of(nans_[i])} << 16) << std::hex << BitsOf(nans_[i]);
      ASSERT_EQ(f16[i], F16Of(out[i])) << std::hex << BitsOf(nans_[i]);
    }
  }
  EXPECT_EQ(residual, residual_before);
  EXPECT_EQ(velocity, velocity_before);
}

}  // namespace
}  // namespace thinwire
