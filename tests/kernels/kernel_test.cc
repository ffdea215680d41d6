// The kernels give the scalar reference's bytes, residuals and values: on CPU threads always, and
// on a GPU if there is one.
#include <gtest/gtest.h>

#include <cstring>

#include "compress/codec_list.h"
#include "compress/element_math.h"
#include "kernels/tile.h"
#include "tests/compress/values.h"
#include "tests/effort.h"
#include "tests/kernels/kernel_checks.h"

namespace thinwire {
namespace {

// Specs whose options have kernels of their own.
constexpr const char* kSpecs[] = {"int4:hadamard=1,seed=7"};
constexpr const char* kOtherSpecs[] = {
    "int4:block=128",    "int8:block=128",           "int8:block=512",
    "onebit:block=128",  "onebit:block=1024",        "int4:block=4096",
    "onebit:block=4096", "adaptive:bits=0.5,seed=7", "adaptive:bits=6,floor=2"};

// All codecs with kernels except those of entries (entry_kernel_test.cc), and kSpecs.
std::vector<std::string> CodeSpecs() {
  std::vector<std::string> specs(std::begin(kSpecs), std::end(kSpecs));
  for (const CodecTraits& codec : kCodecs) {
    if (codec.has_kernels && !codec.entries()) specs.emplace_back(codec.name);
  }
  return specs;
}

std::vector<std::string> AllSpecs() {
  std::vector<std::string> specs = CodeSpecs();
  specs.insert(specs.end(), std::begin(kOtherSpecs), std::end(kOtherSpecs));
  return specs;
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class KernelTest : public KernelChecks {};

std::string NameOf(const testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(On, KernelTest, testing::Values("host", "whole", "cuda"), NameOf);

TEST(Tiles, FewElementsHaveSmallTilesButNoneBelowABlock) {
  using kernels::TeamThreads;
  EXPECT_EQ(TeamThreads(131072, 256), 64) << "8 ranks' part of 4 MiB: 128 tiles in place of 32";
  EXPECT_EQ(TeamThreads(1 << 20, 256), 128);
  EXPECT_EQ(TeamThreads(1 << 24, 256), 256);
  EXPECT_EQ(TeamThreads(1, 1024), 64);
  EXPECT_EQ(TeamThreads(1, 2048), 128);
  EXPECT_EQ(TeamThreads(1, kMaxBlock), 256);
}

TEST_P(KernelTest, MemoryOfATestIsTheNextOnes) {
  if (kSanitized) GTEST_SKIP() << "with a sanitizer all memory is a test's own";
  const auto place_of = [&](size_t bytes) {
    OnDevice memory = Put(std::vector<uint8_t>(bytes));
    memory.Read();
    return memory.data();
  };
  EXPECT_EQ(place_of(1000), place_of(1100));
  OnDevice first = Put(std::vector<uint8_t>(1000)), second = Put(std::vector<uint8_t>(1000));
  EXPECT_NE(first.data(), second.data());
  EXPECT_EQ(first.Read(), second.Read());
}

TEST_P(KernelTest, EveryLengthFrom0To4097) {
  // Tile sizes depend on the number of blocks, and the last block is the same in all of them.
  const bool few = kSanitized || GetParam() == "whole";
  for (const std::string& text : CodeSpecs()) {
    const CodecSpec spec = Spec(text);
    for (size_t numel = 0; numel <= 4097; numel = NextLength(numel, few)) {
      const DType dtype = kDTypes[numel % 3];
      const std::vector<float> values = Values(numel, kSeed + numel);
      CheckEncode({.spec = spec, .momentum = numel % 7 == 0, .skew = numel % 5}, values);
      CheckDecode(spec, values, dtype, numel % 4);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelTest, EveryDTypeWithAndWithoutFeedback) {
  for (const std::string& text : AllSpecs()) {
    for (const DType dtype : kDTypes) {
      for (const size_t numel : std::initializer_list<size_t>{1, 3, 127, 255, 256, 257, 1000, 4095,
                                                              4096, 4097, 12289, Elements(70001)}) {
        for (const size_t skew : {0, 1, 2}) {
          if (!IsTried(numel + static_cast<size_t>(dtype) + skew)) continue;
          const std::vector<float> values = Values(numel, kSeed + numel);
          for (const bool feedback : {false, true}) {
            CheckEncode({Spec(text), dtype, feedback, false, skew}, values);
          }
          CheckDecode(Spec(text), values, dtype, skew);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(KernelTest, ReduceInRankOrder) {
  for (const std::string& up : AllSpecs()) {
    for (const std::string& down : AllSpecs()) {
      for (const size_t numel : {1, 300, 4400}) {
        CheckReduce(Spec(up), Spec(down), numel, kDTypes[numel % 3], 3, numel % 3);
        if (HasFatalFailure()) return;
      }
    }
    for (size_t numel = 0; numel <= 4097; numel += 1 + numel % (kSanitized ? 149 : 37)) {
      CheckReduce(Spec(up), Spec(up), numel, DType::kF32, 2 + numel % 8, numel % 2);
      CheckReduce(Spec(up), Spec(up), numel, DType::kF32, 2, 2);  // no shard of its own
      if (HasFatalFailure()) return;
    }
  }
}

// More ranks than a launch takes, with the owner's shard at any place; the last has no owner.
TEST_P(KernelTest, ReduceOfManyRanksInRankOrder) {
  constexpr int kMost = kernels::kMaxWires;
  const CodecSpec int8 = Spec("int8");
  for (const int owner : {0, 1, kMost - 1, kMost}) {
    CheckReduce(int8, int8, 300 + owner, kDTypes[owner % 3], kMost + 1, owner);
  }
  CheckReduce(int8, int8, 1000, DType::kF16, 2 * kMost + 90, kMost + 40);
  CheckReduce(int8, int8, 4097, DType::kF32, 2 * kMost + 90, 2 * kMost + 90);
  for (const char* const text : {"fp32", "adaptive"}) {
    CheckReduce(Spec(text), Spec(text), 700, DType::kBF16, kMost + 44, 150);
    CheckReduce(Spec("int4"), Spec(text), 700, DType::kF32, kMost + 44, kMost + 20);
  }
}

// Little data but all code, for compute-sanitizer.
TEST_P(KernelTest, EveryKernelOnce) {
  for (const std::string& text : AllSpecs()) {
    for (const DType dtype : kDTypes) {
      const std::vector<float> values = Values(4400, kSeed);
      CheckEncode({.spec = Spec(text), .dtype = dtype, .momentum = true, .skew = 1}, values);
      CheckDecode(Spec(text), values, dtype, 1);
      CheckReduce(Spec("int4"), Spec(text), 4400, dtype, 3, 1);
    }
    CheckReduce(Spec(text), Spec("int4"), 4400, DType::kF32, 3, 1);
    if (HasFatalFailure()) return;
  }
}

// The result's codec differs from the wires', as bf16 for bf16 tensors, and has no wire bytes.
TEST_P(KernelTest, ReduceToAnotherCodecWithoutWireBytes) {
  for (const size_t numel : {1, 300, 5000}) {
    std::vector<float> other = Values(numel, 1);
    std::vector<uint8_t> own = Stored(Residuals(numel, 2), DType::kBF16), out(own.size());
    std::vector<uint8_t> wire(EncodedBytes(Spec("int8"), numel));
    ScalarBackend().Encode(Spec("int8"), {other.data(), numel}, nullptr, wire.data());
    OnDevice device_wire = Put(wire), device_own = Put(own);
    const uint8_t* wires[] = {nullptr, wire.data()};
    const uint8_t* device_wires[] = {nullptr, device_wire.data()};
    ReduceArgs args;
    args.up = Spec("int8");
    args.down = Spec("bf16");
    args.wires = wires;
    args.own = {own.data(), numel, DType::kBF16};
    args.scale = 0.5f;
    args.out = {out.data(), numel, DType::kBF16};
    ScalarBackend().Reduce(args);
    args.wires = device_wires;
    args.own = args.out = {device_own.data(), numel, DType::kBF16};
    backend().Reduce(args);
    EXPECT_EQ(device_own.Read(), out) << numel;
  }
}

// Scales that no encoder produces, from one rank: a NaN keeps its bits, and an infinity makes NaNs
// of codes that are 0.
TEST_P(KernelTest, ReduceOfDamagedScales) {
  const auto damage = [](uint8_t* wire) {
    constexpr uint16_t kScales[] = {0x7f81, 0x7f80, 0xffc1, 0x3f80, 0xff80, 0x0001, 0x7fff};
    memcpy(wire, kScales, sizeof(kScales));
  };
  for (const char* text : {"int8", "int4", "onebit"}) {
    for (const size_t numel : {4096, 4500}) {
      CheckReduce(Spec(text), Spec(text), numel, DType::kF32, 4, 3, damage);
      CheckReduce(Spec(text), Spec("fp32"), numel, DType::kBF16, 3, 1, damage);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(KernelTest, ReduceWithoutWireBytes) {
  const size_t numel = 5000;
  std::vector<float> other = Values(numel, 1), own = Residuals(numel, 2), out(numel);
  std::vector<uint8_t> wire(EncodedBytes(Spec("fp32"), numel));
  ScalarBackend().Encode(Spec("fp32"), {other.data(), numel}, nullptr, wire.data());
  OnDevice device_wire = Put(wire), device_own = Put(BytesOf(own));
  const uint8_t* wires[] = {nullptr, wire.data()};
  const uint8_t* device_wires[] = {nullptr, device_wire.data()};
  ReduceArgs args;
  args.wires = wires;
  args.own = {own.data(), numel};
  args.scale = 0.5f;
  args.out = {out.data(), numel};
  ScalarBackend().Reduce(args);
  args.wires = device_wires;
  args.own = args.out = {device_own.data(), numel};
  backend().Reduce(args);
  EXPECT_EQ(device_own.Read(), BytesOf(out));
}

// More shards than one launch takes, of all sizes, some of them empty.
TEST_P(KernelTest, ManyShardsAtOnce) {
  const CodecSpec spec = Spec("int4");
  const size_t shards = 2 * kernels::kMaxJobs + 5;
  std::vector<std::vector<uint8_t>> gradients(shards), wires(shards), results(shards);
  std::vector<OnDevice> inputs, encoded, outputs;
  std::vector<EncodeArgs> encode;
  std::vector<DecodeArgs> decode;
  for (size_t i = 0; i < shards; ++i) {
    const size_t numel = i % 7 == 3 ? 0 : i * 977 % 9000;
    gradients[i] = BytesOf(Values(numel, i));
    wires[i].resize(EncodedBytes(spec, numel));
    results[i].resize(numel * sizeof(float));
    const TensorView view{gradients[i].data(), numel};
    ScalarBackend().Encode(spec, view, nullptr, wires[i].data());
    ScalarBackend().Decode(spec, wires[i].data(), {results[i].data(), numel});
    inputs.push_back(Put(gradients[i]));
    encoded.emplace_back(*device_, *stream_, wires[i].size());
    outputs.emplace_back(*device_, *stream_, results[i].size());
    encode.push_back({{inputs[i].data(), numel}, nullptr, encoded[i].data()});
    decode.push_back({encoded[i].data(), {outputs[i].data(), numel}});
  }
  backend().EncodeAll(spec, encode);
  backend().DecodeAll(spec, decode);
  for (size_t i = 0; i < shards; ++i) {
    EXPECT_EQ(encoded[i].Read(), wires[i]) << "shard " << i;
    EXPECT_EQ(outputs[i].Read(), results[i]) << "shard " << i;
  }
}

TEST_P(KernelTest, AccumulateRoundsProductAndSum) {
  for (const DType dtype : kDTypes) {
    for (const size_t numel : {1, 100, 4096, 10001}) {
      std::vector<uint8_t> gradient = Stored(Values(numel, numel), dtype);
      std::vector<float> sum = Residuals(numel, 9);
      OnDevice g = Put(gradient), s = Put(BytesOf(sum));
      backend().Accumulate({g.data(), numel, dtype}, 0.9f, {s.floats(), numel},
                           {s.floats(), numel});
      ScalarBackend().Accumulate({gradient.data(), numel, dtype}, 0.9f, sum, sum);
      EXPECT_EQ(s.Read(), BytesOf(sum)) << numel << " " << Name(dtype);
    }
  }
}

TEST_P(KernelTest, CopyFiniteLeavesTheRest) {
  for (const size_t numel : {0, 1, 100, 4096, 10001}) {
    for (const size_t skew : {0, 1}) {
      std::vector<float> from = Values(numel, 6), to = Residuals(numel, 7);
      OnDevice f = Put(BytesOf(from)), t = Put(BytesOf(to), skew * sizeof(float));
      backend().CopyFinite({f.floats(), numel}, {t.floats(), numel});
      ScalarBackend().CopyFinite(from, to);
      EXPECT_EQ(t.Read(), BytesOf(to)) << numel << ", skew " << skew;
    }
  }
}

// Each kernel makes one pass where the host makes several. Velocity stays if m is not finite.
TEST_P(KernelTest, MomentumAroundAnExchange) {
  for (const DType dtype : kDTypes) {
    for (const size_t numel : {0, 1, 100, 4096, 10001}) {
      for (const bool nesterov : {false, true}) {
        SCOPED_TRACE(std::to_string(numel) + " " + std::string(Name(dtype)) +
                     (nesterov ? ", Nesterov" : ""));
        std::vector<uint8_t> gradient = Stored(Values(numel, 3), dtype), out(gradient.size());
        std::vector<float> velocity = Residuals(numel, 8), own(numel), m = Values(numel, 5);
        OnDevice g = Put(gradient), o = Put(out), v = Put(BytesOf(velocity));
        OnDevice x = Put(BytesOf(own)), n = Put(BytesOf(m));
        backend().Accumulate({g.data(), numel, dtype}, 0.9f, {v.floats(), numel},
                             {x.floats(), numel});
        ScalarBackend().Accumulate({gradient.data(), numel, dtype}, 0.9f, velocity, own);
        EXPECT_EQ(x.Read(), BytesOf(own));
        backend().EndMomentum({0.9f, nesterov, v.floats()}, {n.floats(), numel},
                              {o.data(), numel, dtype});
        ScalarBackend().EndMomentum({0.9f, nesterov, velocity.data()}, m,
                                    {out.data(), numel, dtype});
        EXPECT_EQ(o.Read(), out);
        EXPECT_EQ(v.Read(), BytesOf(velocity)) << "velocity";
      }
    }
  }
}

// Momentum within the encoding pass, for all codecs: gradient, velocity and residual are read once.
TEST_P(KernelTest, MomentumInTheEncoding) {
  for (const std::string& text : AllSpecs()) {
    for (const DType dtype : kDTypes) {
      for (const size_t numel : {0, 1, 255, 4096, 12289}) {
        for (const bool feedback : {false, true}) {
          CheckEncode({Spec(text), dtype, feedback, true, numel % 4}, Values(numel, numel));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Converts to and from every dtype by each codec of elements. tests/compress/nan_test.cc checks the
// reference against FORMAT.md.
TEST_P(KernelTest, NansKeepTheirBits) {
  const size_t numel = 4099;
  for (const char* text : {"fp32", "bf16"}) {
    const CodecSpec spec = Spec(text);
    for (const DType from : kDTypes) {
      std::vector<uint8_t> gradient = Stored(Nans(numel, kSeed), from);
      OnDevice g = Put(gradient);
      std::vector<uint8_t> expected(EncodedBytes(spec, numel));
      OnDevice wire = Put(expected);
      backend().Encode(spec, {g.data(), numel, from}, nullptr, wire.data());
      ScalarBackend().Encode(spec, {gradient.data(), numel, from}, nullptr, expected.data());
      ASSERT_EQ(wire.Read(), expected) << text << " of " << Name(from);
      for (const DType to : kDTypes) {
        std::vector<uint8_t> out(numel * SizeOf(to));
        OnDevice result = Put(out);
        backend().Decode(spec, wire.data(), {result.data(), numel, to});
        ScalarBackend().Decode(spec, expected.data(), {out.data(), numel, to});
        ASSERT_EQ(result.Read(), out) << text << " of " << Name(from) << " to " << Name(to);
      }
    }
  }
}

// FORMAT.md fixes the order of onebit's sum, which random blocks hardly ever reveal.
TEST_P(KernelTest, OneBitSumsInItsOrder) {
  for (const uint32_t block : {128u, 256u, 4096u}) {
    CodecSpec spec = Spec("onebit");
    spec.block = block;
    for (size_t big = 0; big < block; big += 37) {
      std::vector<float> values(block, 0x1p-16f);
      values[big] = 257.0f;
      OnDevice g = Put(BytesOf(values));
      std::vector<uint8_t> expected(EncodedBytes(spec, block));
      OnDevice wire(*device_, *stream_, expected.size());
      backend().Encode(spec, {g.data(), block}, nullptr, wire.data());
      ScalarBackend().Encode(spec, {values.data(), block}, nullptr, expected.data());
      ASSERT_EQ(wire.Read(), expected) << "block " << block << ", element " << big;
    }
  }
}

}  // namespace
}  // namespace thinwire
