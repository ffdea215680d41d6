// topk's kernels give the scalar reference's bytes, residuals and momentum, whatever the threshold
// was: on CPU threads always, on a GPU where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "compress/codec_list.h"
#include "kernels/tile.h"
#include "tests/compress/values.h"
#include "tests/effort.h"
#include "tests/kernels/kernel_checks.h"

namespace thinwire {
namespace {

CodecSpec TopK(uint32_t density_ppm) {
  return {.id = codecs::TopK::kTraits.id, .density_ppm = density_ppm};
}

// How a tensor is encoded; the momentum is DGC's.
struct EntryEncoding {
  CodecSpec spec;
  DType dtype = DType::kF32;
  bool feedback = true, momentum = false, nesterov = false;
  size_t skew = 0;         // elements between an aligned address and the first element
  float threshold = 0.0f;  // 0: as in the first step
};

class EntryKernelTest : public KernelChecks {
 protected:
  // Returns the new threshold.
  float CheckEncode(const EntryEncoding& c, const std::vector<float>& values);
  // Checks entries that are added, times a factor.
  void CheckAdded(const CodecSpec& spec, const std::vector<float>& values);
  void CheckSum(const CodecSpec& spec, size_t numel, int ranks);
  // Returns the adding kernel's result for any bytes.
  std::vector<float> Decoded(const CodecSpec& spec, const std::vector<uint8_t>& bytes,
                             size_t numel);
};
INSTANTIATE_TEST_SUITE_P(On, EntryKernelTest, testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

float EntryKernelTest::CheckEncode(const EntryEncoding& c, const std::vector<float>& values) {
  const size_t numel = values.size(), bytes = EncodedBytes(c.spec, numel);
  SCOPED_TRACE(c.spec.ToString() + " of " + std::to_string(numel) + " " +
               std::string(Name(c.dtype)) + ", threshold " + std::to_string(c.threshold) +
               (c.feedback ? ", feedback" : "") + (c.momentum ? ", momentum" : ""));
  std::vector<uint8_t> gradient = Stored(values, c.dtype);
  std::vector<float> residual = Residuals(numel, numel), velocity = Residuals(numel, numel + 1);
  const std::vector<uint8_t> threshold = BytesOf({c.threshold});
  OnDevice g = Put(gradient, c.skew * SizeOf(c.dtype));
  OnDevice r = Put(BytesOf(residual), c.skew * sizeof(float));
  OnDevice u = Put(BytesOf(velocity)), t = Put(threshold);
  OnDevice wire = Put(std::vector<uint8_t>(bytes, 0xAA));  // padding must be written as well
  backend().Encode(c.spec, {.gradient = {g.data(), numel, c.dtype},
                            .residual = c.feedback ? r.floats() : nullptr,
                            .wire = wire.data(),
                            .threshold = t.floats(),
                            .momentum = {0.9f, c.nesterov, c.momentum ? u.floats() : nullptr}});
  std::vector<uint8_t> expected(bytes);
  ScalarBackend().Encode(c.spec,
                         {.gradient = {gradient.data(), numel, c.dtype},
                          .residual = c.feedback ? residual.data() : nullptr,
                          .wire = expected.data(),
                          .momentum = {0.9f, c.nesterov, c.momentum ? velocity.data() : nullptr}});
  EXPECT_EQ(wire.Read(), expected);
  EXPECT_EQ(r.Read(), BytesOf(residual)) << "residuals";
  EXPECT_EQ(u.Read(), BytesOf(velocity)) << "momentum";
  float left = 0;
  std::memcpy(&left, t.Read().data(), sizeof(left));
  return left;
}

void EntryKernelTest::CheckAdded(const CodecSpec& spec, const std::vector<float>& values) {
  const size_t numel = values.size();
  SCOPED_TRACE(spec.ToString() + " of " + std::to_string(numel) + ", added");
  std::vector<float> g = values, sum = Residuals(numel, numel);
  std::vector<uint8_t> bytes(EncodedBytes(spec, numel));
  ScalarBackend().Encode(spec, {g.data(), numel}, nullptr, bytes.data());
  OnDevice wire = Put(bytes), added = Put(BytesOf(sum));
  backend().DecodeAdd(spec, wire.data(), {added.floats(), numel});
  ScalarBackend().DecodeAdd(spec, bytes.data(), sum);
  EXPECT_EQ(added.Read(), BytesOf(sum));
}

void EntryKernelTest::CheckSum(const CodecSpec& spec, size_t numel, int ranks) {
  SCOPED_TRACE(std::to_string(numel) + " from " + std::to_string(ranks) + " ranks");
  std::vector<std::vector<uint8_t>> bytes(ranks);
  std::vector<OnDevice> copies;
  copies.reserve(ranks);
  std::vector<const uint8_t*> wires, device_wires;
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> g = Values(numel, kSeed + r);
    bytes[r].resize(EncodedBytes(spec, numel));
    ScalarBackend().Encode(spec, {g.data(), numel}, nullptr, bytes[r].data());
    copies.push_back(Put(bytes[r]));
    wires.push_back(bytes[r].data());
    device_wires.push_back(copies.back().data());
  }
  std::vector<float> expected(numel);
  ScalarBackend().SumEntries(spec, wires, 1.0f / 3, expected);
  OnDevice sum(*device_, *stream_, numel * sizeof(float));
  backend().SumEntries(spec, device_wires, 1.0f / 3, {sum.floats(), numel});
  EXPECT_EQ(sum.Read(), BytesOf(expected));
}

TEST_P(EntryKernelTest, EveryLengthFrom0To4097) {
  for (const uint32_t ppm : {10000u, 300000u}) {
    for (size_t numel = 0; numel <= 4097; numel = NextLength(numel)) {
      const EntryEncoding c{.spec = TopK(ppm),
                            .dtype = numel % 2 == 0 ? DType::kF32 : DType::kBF16,
                            .momentum = numel % 3 == 0,
                            .skew = numel % 5,
                            .threshold = numel % 4 == 0 ? 0.6f : 0.0f};
      CheckEncode(c, numel % 7 == 0 ? Values(numel, kSeed + numel) : Residuals(numel, numel));
      CheckDecode(TopK(ppm), Values(numel, numel), numel % 2 == 0 ? DType::kF16 : DType::kF32,
                  numel % 3);
      CheckAdded(TopK(ppm), Values(numel, numel));
      if (HasFailure()) return;
    }
  }
}

// Sizes around the end of a sub-block, with every kind of guess: none, far too low, about right, a
// little too high and far too high.
TEST_P(EntryKernelTest, EveryGuessAroundASubBlock) {
  for (const size_t numel : {65535, 65536, 65537, 140001}) {
    if (kSanitized && numel != 65537) continue;
    for (const uint32_t ppm : {1u, 10000u, 1000000u}) {
      for (const float threshold : {0.0f, 1e-30f, 0.9f, 1.2f, 1e30f}) {
        CheckEncode({.spec = TopK(ppm), .threshold = threshold}, Residuals(numel, numel));
        if (HasFailure()) return;
      }
      CheckDecode(TopK(ppm), Values(numel, numel), DType::kF32, 1);
      CheckAdded(TopK(ppm), Values(numel, numel));
    }
  }
}

// More tiles than there are teams that count digits.
TEST_P(EntryKernelTest, MoreTilesThanAGpuHolds) {
  const size_t numel = (kernels::kTilesToFill + 3) * size_t{kernels::kTile} + 5;
  const std::vector<float> values = Residuals(numel, 3);
  for (const float threshold : {0.0f, 1.2f, 1e30f}) {
    if (kSanitized && threshold != 1e30f) continue;
    CheckEncode({.spec = TopK(10000), .threshold = threshold}, values);
  }
}

TEST_P(EntryKernelTest, EveryDTypeWithAndWithoutFeedbackAndMomentum) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t numel : {1, 100, 4096, 12289, 70001}) {
      if (kSanitized && numel > 70000 && dtype != DType::kF16) continue;
      for (const int kind : {0, 1, 2, 3, 4}) {
        EntryEncoding c{.spec = TopK(20000), .dtype = dtype, .skew = numel % 3, .threshold = 0.7f};
        c.feedback = kind > 0;
        c.momentum = kind > 1;
        c.nesterov = kind == 3;
        c.spec.masking = kind != 4;
        CheckEncode(c, Residuals(numel, numel));
        CheckEncode(c, Values(numel, numel));
        if (HasFailure()) return;
      }
    }
  }
}

// Values that are not finite are sent first, and leave residual and momentum unchanged.
TEST_P(EntryKernelTest, ElementsThatAreNotFinite) {
  const std::vector<float> nans = Nans(20000, kSeed);
  CheckEncode({.spec = TopK(10000), .momentum = true}, nans);
  for (const size_t stride : {1, 2, 300, 5000, 19999}) {
    std::vector<float> values = Residuals(20000, 1);
    for (size_t i = 0; i < values.size(); i += stride) {
      values[i] = i % 3 == 0 ? nans[i] : (i % 3 == 1 ? 1 : -1) * FloatOf(kInfBits);
    }
    values[values.size() / 3] = std::numeric_limits<float>::max();
    for (const float threshold : {0.0f, 0.7f, 1e30f}) {
      CheckEncode({.spec = TopK(10000), .momentum = true, .threshold = threshold}, values);
      if (HasFailure()) return;
    }
  }
}

TEST_P(EntryKernelTest, TiesGoToTheLowestIndex) {
  std::vector<float> equal(70000, -3.0f), zeros(70000, -0.0f), tiny(70000, 1e-42f), few = equal;
  for (size_t i = 0; i < few.size(); ++i) few[i] = i % 1000 == 0 ? 4.0f : i % 7 == 0 ? -2.0f : 1.0f;
  for (const auto* values : {&equal, &zeros, &tiny, &few}) {
    for (const uint32_t ppm : {100u, 10000u, 500000u}) {
      for (const float threshold : {0.0f, 2.0f}) {
        CheckEncode({.spec = TopK(ppm), .feedback = false, .threshold = threshold}, *values);
        if (HasFailure()) return;
      }
    }
    CheckDecode(TopK(10000), *values, DType::kF32, 0);
  }
}

// Some tiles hold runs of large values, so their candidates do not fit into the list.
TEST_P(EntryKernelTest, CandidatesWithoutRoom) {
  std::vector<float> values = Residuals(100000, 5);
  for (size_t i = 30000; i < 60000; ++i) values[i] += 10.0f;
  for (const uint32_t ppm : {1000u, 200000u}) {
    CheckEncode({.spec = TopK(ppm), .momentum = true, .threshold = 1.0f}, values);
  }
}

// The last team goes over the tiles in several rounds.
TEST_P(EntryKernelTest, MoreTilesThanThreads) {
  if (kSanitized) return;
  CheckEncode({.spec = TopK(10000), .threshold = 0.7f}, Residuals(1100000, 6));
}

TEST_P(EntryKernelTest, TheThresholdIsCarried) {
  const std::vector<float> values = Residuals(50000, 9);
  const float first = CheckEncode({.spec = TopK(10000)}, values);
  EXPECT_GT(first, 0.3f);
  EXPECT_EQ(CheckEncode({.spec = TopK(10000), .threshold = first}, values), first);
  EXPECT_EQ(CheckEncode({.spec = TopK(10000)}, Nans(5000, 1)), FloatOf(kHugeBits));
}

TEST_P(EntryKernelTest, SumsInRankOrder) {
  for (const size_t numel : {1, 4097, 66000}) {
    for (const int ranks : {1, 3, 5}) CheckSum(TopK(40000), numel, ranks);
  }
  CheckSum(TopK(40000), 4097, 2 * kernels::kMaxWires + 3);  // in several launches
}

// Little data but all code, for compute-sanitizer.
TEST_P(EntryKernelTest, EveryKernelOnce) {
  for (const float threshold : {0.0f, 0.9f, 1e30f}) {
    CheckEncode({.spec = TopK(10000), .momentum = true, .threshold = threshold},
                Residuals(70000, 2));
    CheckEncode({.spec = TopK(10000), .momentum = true, .threshold = threshold}, Values(9000, 2));
  }
  CheckDecode(TopK(10000), Values(70000, 3), DType::kF16, 1);
  CheckAdded(TopK(10000), Values(70000, 3));
  CheckSum(TopK(10000), 70000, 3);
}

std::vector<float> EntryKernelTest::Decoded(const CodecSpec& spec,
                                            const std::vector<uint8_t>& bytes, size_t numel) {
  OnDevice wire = Put(bytes), sum(*device_, *stream_, numel * sizeof(float));
  const uint8_t* const wires[] = {wire.data()};
  backend().SumEntries(spec, wires, 1.0f, {sum.floats(), numel});
  const std::vector<uint8_t> read = sum.Read();
  std::vector<float> values(numel);
  std::memcpy(values.data(), read.data(), read.size());
  return values;
}

// Bytes that CheckWire refuses on the host turn only their part of the result into NaN here.
TEST_P(EntryKernelTest, MalformedBytesBecomeNan) {
  const size_t numel = 70000;
  const CodecSpec spec = TopK(10000);
  std::vector<float> g = Residuals(numel, 4);
  std::vector<uint8_t> good(EncodedBytes(spec, numel));
  ScalarBackend().Encode(spec, {g.data(), numel}, nullptr, good.data());
  const auto nans = [&](size_t word, uint32_t value) {
    std::vector<uint8_t> bytes = good;
    std::memcpy(bytes.data() + word * sizeof(value), &value, sizeof(value));
    EXPECT_FALSE(CheckWire(spec, bytes, numel).ok());
    const std::vector<float> values = Decoded(spec, bytes, numel);
    return std::count_if(values.begin(), values.end(), [](float x) { return x != x; });
  };
  EXPECT_EQ(nans(0, 0), numel);                    // counts with a smaller sum
  EXPECT_EQ(nans(0, 0xffffffff), numel);           // a larger sum
  EXPECT_EQ(nans(4 + 300, 3), 65536);              // an index that does not ascend
  EXPECT_EQ(nans(4 + 699, 65535), 70000 - 65536);  // one past the last element
  std::vector<float> expected(numel);
  ScalarBackend().Decode(spec, good.data(), {expected.data(), numel});
  EXPECT_EQ(Decoded(spec, good, numel), expected);
}

}  // namespace
}  // namespace thinwire
