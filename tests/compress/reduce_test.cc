// The SIMD backend reduces to the scalar reference's bytes, residuals and values.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/compress/target_test.h"
#include "tests/compress/values.h"
#include "tests/effort.h"

namespace thinwire {
namespace {

// me == world: the reducer owns no shard.
void CheckReduce(const CodecPair& pair, DType dtype, int world, int me, size_t numel) {
  std::vector<std::vector<uint8_t>> wires(world,
                                          std::vector<uint8_t>(EncodedBytes(pair.up, numel)));
  std::vector<const uint8_t*> pointers(world);
  for (int r = 0; r < world; ++r) {
    std::vector<float> g = Values(numel, kSeed + r + numel);
    CpuBackend().Encode(pair.up, {g.data(), numel}, nullptr, wires[r].data());
    pointers[r] = r == me ? nullptr : wires[r].data();
  }
  const std::vector<float> own_values = Values(numel, kSeed + 31 * me);
  const bool owns = me < world;
  std::vector<uint8_t> own(numel * 4), out1(numel * 4), out2(numel * 4);
  ScalarBackend().Decode(Spec("fp32"), reinterpret_cast<const uint8_t*>(own_values.data()),
                         {own.data(), numel, dtype});
  std::vector<float> r1 = Residuals(numel, 5), r2 = r1;
  const bool feedback = me != 1;
  std::vector<uint8_t> w1(EncodedBytes(pair.down, numel)), w2 = w1;
  ReduceArgs args{.up = pair.up,
                  .down = pair.down,
                  .wires = pointers,
                  .own = {owns ? own.data() : nullptr, numel, dtype},
                  .scale = 1.0f / static_cast<float>(world),
                  .residual = feedback ? r1.data() : nullptr,
                  .out = {out1.data(), numel, dtype},
                  .wire_out = w1.data(),
                  .draws = {kSeed, 3, 256}};
  CpuBackend().Reduce(args);
  if (feedback) args.residual = r2.data();
  args.out.data = out2.data();
  args.wire_out = w2.data();
  ScalarBackend().Reduce(args);

  const std::string what = pair.up.ToString() + " and " + pair.down.ToString() + ", " +
                           std::string(Name(dtype)) + ", world " + std::to_string(world) +
                           ", rank " + std::to_string(me) + ", " + std::to_string(numel);
  if (pair.down.traits().uses_feedback()) {  // without feedback NaN payloads differ
    ASSERT_EQ(w1, w2) << what;
  }
  ASSERT_TRUE(SameBits(r1.data(), r2.data(), numel * 4)) << what;
  if (dtype == DType::kF32) {
    ExpectSameFloats(reinterpret_cast<float*>(out1.data()), reinterpret_cast<float*>(out2.data()),
                     numel, what);
  } else {
    ASSERT_EQ(out1, out2) << what;
  }
}

TEST_P(TargetTest, ReduceIsSumScaleEncodeDecode) {
  size_t number = 0;
  for (const char* text :
       {"fp32", "bf16", "int8", "int4", "int4:block=1024", "onebit", "onebit:down=onebit",
        "int8:down=int4", "int4:hadamard=1", "int8:rounding=stochastic",
        "onebit:block=512,down=int8", "adaptive", "adaptive:bits=1,down=adaptive:bits=4",
        "int8:down=adaptive", "adaptive:down=int4", "ternary:threshold=0.1",
        "ternary:down=ternary:threshold=0.01", "ternary:down=fp32", "int4:down=ternary"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int world : {2, 3, 5}) {
        for (const size_t numel : {1, 255, 256, 300, 5000}) {
          for (int me = 0; me <= world; ++me) {
            if (!IsTried(number++)) continue;
            CheckReduce(*CodecPair::Parse(text), dtype, world, me, numel);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// A server that owns no shard adds the wires of two workers.
TEST_P(TargetTest, TwoWiresWithoutAShardOfTheReducersOwnAreBothAdded) {
  constexpr size_t kNumel = 5000;
  const std::vector<float> ones(kNumel, 1.0f), twos(kNumel, 2.0f);
  for (const char* text : {"fp32", "bf16", "int8", "int4", "onebit", "adaptive", "ternary"}) {
    const CodecSpec spec = Spec(text);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      std::vector<uint8_t> first(EncodedBytes(spec, kNumel)), second = first;
      std::vector<float> a(kNumel), b(kNumel), out(kNumel), expected(kNumel);
      for (const Backend* backend : {&CpuBackend(), &ScalarBackend()}) {
        backend->Encode(spec, {const_cast<float*>(ones.data()), kNumel}, nullptr, first.data());
        backend->Encode(spec, {const_cast<float*>(twos.data()), kNumel}, nullptr, second.data());
        backend->Decode(spec, first.data(), {a.data(), kNumel});
        backend->Decode(spec, second.data(), {b.data(), kNumel});
        for (size_t i = 0; i < kNumel; ++i) expected[i] = a[i] + b[i];
        const std::vector<const uint8_t*> wires = {first.data(), second.data()};
        std::vector<uint8_t> wire(EncodedBytes(Spec("fp32"), kNumel)), result(4 * kNumel);
        std::vector<uint8_t> rounded(4 * kNumel);
        backend->Reduce({.up = spec,
                         .down = Spec("fp32"),
                         .wires = wires,
                         .own = {nullptr, kNumel, dtype},
                         .out = {result.data(), kNumel, dtype},
                         .wire_out = wire.data()});
        backend->Decode(Spec("fp32"), wire.data(), {out.data(), kNumel});
        ASSERT_EQ(out, expected) << text << ", " << Name(dtype);
        backend->Decode(Spec("fp32"), wire.data(), {rounded.data(), kNumel, dtype});
        ASSERT_EQ(result, rounded) << text << ", " << Name(dtype);
      }
    }
  }
}

// Adds up fp32 in place without encoding it again, as the algorithms call it.
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

}  // namespace
}  // namespace thinwire
