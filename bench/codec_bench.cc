// Every codec operation against its twin, interleaved in one run. Names are OP/SPEC/BYTES, BYTES of
// fp32. Counters: ratio_to_twin (median time / median twin time), its spread (the middle half of
// the repetitions' ratios), and the fp32 bandwidth of both. With --simd=AVX2 another instruction
// set. One operation has another measure than a twin: rounding is stochastic against nearest.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/times.h"
#include "bench/twins.h"
#include "compress/backend.h"
#include "compress/codec_info.h"
#include "compress/codec_list.h"

namespace thinwire {
namespace {

constexpr int kRepetitions = 21;
constexpr size_t kBytesPerRepetition = size_t{16} << 20;

using twin::Aligned;

// All that any operation reads or writes.
struct Arrays {
  Arrays(const CodecSpec& spec, size_t n)
      : g(Aligned<float>(n + kShifts * kShift)),
        r(Aligned<float>(n)),
        out(Aligned<float>(n)),
        wire(Aligned<uint8_t>(EncodedBytes(spec, n))),
        peer(Aligned<uint8_t>(EncodedBytes(spec, n))) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1e-3f);
    for (size_t i = 0; i < n + kShifts * kShift; ++i) g.get()[i] = normal(random);
    CpuBackend().Encode(spec, {g.get(), n}, nullptr, peer.get());
  }

  // Another gradient each step, as training has: the same values, shifted.
  float* NextGradient() { return g.get() + kShift * (step++ % kShifts); }

  static constexpr size_t kShift = 256, kShifts = 61;
  std::unique_ptr<float, twin::Free> g, r, out;
  std::unique_ptr<uint8_t, twin::Free> wire, peer;
  float threshold = 0;
  size_t step = 0;
};

using Body = std::function<void(Arrays&)>;
struct Operation {
  Body codec, twin;
};

Operation MakeOperation(const std::string& op, const CodecSpec& spec, size_t n) {
  const Backend& codecs = CpuBackend();
  const double bits = spec.traits().widths() ? spec.sixteenths / 16.0
                                             : static_cast<double>(spec.traits().code_bits);
  const auto view = [n](float* p) { return TensorView{p, n}; };
  if (op == "encode_ef") {
    return {
        [=, &codecs](Arrays& a) { codecs.Encode(spec, view(a.g.get()), a.r.get(), a.wire.get()); },
        [=](Arrays& a) { twin::EncodeWithFeedback(a.g.get(), a.r.get(), a.wire.get(), n, bits); }};
  }
  if (op == "encode") {
    return {
        [=, &codecs](Arrays& a) { codecs.Encode(spec, view(a.g.get()), nullptr, a.wire.get()); },
        [=](Arrays& a) { twin::Encode(a.g.get(), a.wire.get(), n, bits); }};
  }
  if (op == "decode") {
    return {[=, &codecs](Arrays& a) { codecs.Decode(spec, a.peer.get(), view(a.out.get())); },
            [=](Arrays& a) { twin::Decode(a.peer.get(), a.out.get(), n, bits); }};
  }
  if (op == "decode_add") {
    return {[=, &codecs](Arrays& a) {
              codecs.DecodeAdd(spec, a.peer.get(), {a.out.get(), n});
            },
            [=](Arrays& a) { twin::DecodeAdd(a.peer.get(), a.out.get(), n, bits); }};
  }
  const size_t peers = op == "reduce8_requant" ? 7 : 1;
  return {[=, &codecs](Arrays& a) {
            std::vector<const uint8_t*> wires(1 + peers, a.peer.get());
            wires[0] = nullptr;
            codecs.Reduce({spec,
                           spec,
                           wires,
                           view(a.g.get()),
                           0.5f,
                           a.r.get(),
                           view(a.out.get()),
                           a.wire.get(),
                           {}});
          },
          // Each further rank's bytes are read, and the sum stays where it is.
          [=](Arrays& a) {
            for (size_t rank = 1; rank < peers; ++rank) {
              twin::Decode(a.peer.get(), a.out.get(), n, bits);
            }
            twin::Reduce(a.g.get(), a.peer.get(), a.r.get(), a.out.get(), a.wire.get(), n, bits);
          }};
}

// topk with the last step's threshold.
Operation MakeSelection(const CodecSpec& spec, size_t n) {
  const Backend& codecs = CpuBackend();
  return {[=, &codecs](Arrays& a) {
            codecs.Encode(spec, {.gradient = {a.NextGradient(), n},
                                 .residual = a.r.get(),
                                 .wire = a.wire.get(),
                                 .threshold = &a.threshold});
          },
          [=](Arrays& a) { twin::Accumulate(a.NextGradient(), a.r.get(), n); }};
}

// Stochastic rounding against rounding to the nearest.
Operation MakeRounding(const CodecSpec& spec, size_t n) {
  const Backend& codecs = CpuBackend();
  const auto encode = [=, &codecs](Rounding rounding) {
    return [=, &codecs](Arrays& a) {
      CodecSpec now = spec;
      now.rounding = rounding;
      codecs.Encode(now, {a.g.get(), n}, a.r.get(), a.wire.get());
    };
  };
  return {encode(Rounding::kStochastic), encode(Rounding::kNearest)};
}

double Seconds(const Body& body, Arrays& arrays, size_t rounds) {
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < rounds; ++i) body(arrays);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
         static_cast<double>(rounds);
}

void Run(benchmark::State& state, const std::string& op, const CodecSpec& spec, size_t bytes) {
  const size_t n = bytes / sizeof(float), rounds = std::max<size_t>(1, kBytesPerRepetition / bytes);
  const Operation operation = op == "rounding" ? MakeRounding(spec, n)
                              : op == "select" ? MakeSelection(spec, n)
                                               : MakeOperation(op, spec, n);
  // Each side has arrays of its own, so that residuals stay what each made them.
  Arrays mine(spec, n), twins(spec, n);
  std::vector<double> codec, twin, ratio;
  for (auto _ : state) {
    for (int i = -2; i < kRepetitions; ++i) {
      const double t = Seconds(operation.twin, twins, rounds),
                   c = Seconds(operation.codec, mine, rounds);
      if (i < 0) continue;  // warm-up
      codec.push_back(c);
      twin.push_back(t);
      ratio.push_back(c / t);
    }
    state.SetIterationTime(Quantile(codec, 0.5));
  }
  state.counters["ratio_to_twin"] = Quantile(codec, 0.5) / Quantile(twin, 0.5);
  state.counters["ratio_low"] = Quantile(ratio, 0.25);
  state.counters["ratio_high"] = Quantile(ratio, 0.75);
  state.counters["GB_per_s"] = 1e-9 * static_cast<double>(bytes) / Quantile(codec, 0.5);
  state.counters["twin_GB_per_s"] = 1e-9 * static_cast<double>(bytes) / Quantile(twin, 0.5);
}

void Register(const std::string& op, const CodecSpec& spec) {
  for (const size_t bytes : {size_t{65536}, size_t{1048576}, size_t{67108864}}) {
    const std::string name = op + "/" + spec.ToString() + "/" + std::to_string(bytes);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& s) { Run(s, op, spec, bytes); })
        ->UseManualTime()
        ->Iterations(1);
  }
}

void RegisterAll() {
  for (const CodecTraits& codec : kCodecs) {
    const CodecSpec spec{.id = codec.id};
    if (codec.entries()) {
      for (const uint32_t ppm : {10000u, 1000u}) {
        Register("select", {.id = codec.id, .density_ppm = ppm});
      }
      continue;
    }
    for (const char* op :
         {"encode_ef", "encode", "decode", "decode_add", "reduce_requant", "reduce8_requant"}) {
      Register(op, spec);
      if (codec.widths()) Register(op, {.id = codec.id, .sixteenths = 8});
    }
    if (InfoOf(codec.id).FindParameter("rounding") != nullptr) Register("rounding", spec);
  }
}

}  // namespace
}  // namespace thinwire

int main(int argc, char** argv) {
  constexpr char kFlag[] = "--simd=";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind(kFlag, 0) != 0) continue;
    thinwire::ForceSimdTarget(argument.substr(sizeof(kFlag) - 1));
    std::rotate(argv + i, argv + i + 1, argv + argc--);
    --i;
  }
  benchmark::AddCustomContext("simd", thinwire::SimdTargetName());
  thinwire::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
