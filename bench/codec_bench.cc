// Every codec operation against its twin, interleaved in one run. Names are OP/SPEC/BYTES, BYTES of
// fp32. Counters: ratio_to_twin (median time / median twin time), its spread (the middle half of
// the repetitions' ratios), and the fp32 bandwidth of both. --simd=AVX2 selects another instruction
// set. One operation is not compared with a twin: stochastic rounding is compared with nearest.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <map>
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

// A codec with all that the operations read or write.
struct Arrays {
  Arrays(const CodecSpec& codec, size_t count)
      : spec(codec),
        n(count),
        bits(codec.traits().widths() ? codec.sixteenths / 16.0
                                     : static_cast<double>(codec.traits().code_bits)),
        gradients(twin::Aligned<float>(n + kShifts * kShift)),
        residual(twin::Aligned<float>(n)),
        floats(twin::Aligned<float>(n)),
        coded(twin::Aligned<uint8_t>(EncodedBytes(spec, n))),
        received(twin::Aligned<uint8_t>(EncodedBytes(spec, n))) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1e-3f);
    for (size_t i = 0; i < n + kShifts * kShift; ++i) g[i] = normal(random);
    codecs.Encode(spec, {g, n}, nullptr, peer);
  }

  // Another gradient in each step, as in training: the same values, shifted.
  float* NextGradient() { return g + kShift * (step++ % kShifts); }
  void Encode(Rounding rounding) {
    CodecSpec now = spec;
    now.rounding = rounding;
    codecs.Encode(now, {g, n}, r, wire);
  }
  void Reduce(size_t peers) {
    std::vector<const uint8_t*> wires(1 + peers, peer);
    wires[0] = nullptr;
    codecs.Reduce({spec, spec, wires, {g, n}, 0.5f, r, {out, n}, wire, {}});
  }
  // Runs a twin that moves n elements of the arrays in `moved`.
  void Twin(twin::Moved moved) {
    moved.numel = n;
    moved.bits = bits;
    twin::Move(moved);
  }
  // The bytes of each further rank are read; the sum stays in `out`.
  void TwinOfReduce(size_t peers) {
    for (size_t rank = 1; rank < peers; ++rank) Twin({.codes_in = peer, .floats = out});
    Twin({.gradient = g, .residual = r, .codes_in = peer, .floats = out, .codes_out = wire});
  }

  static constexpr size_t kShift = 256, kShifts = 61;
  const Backend& codecs = CpuBackend();
  const CodecSpec spec;
  const size_t n;
  const double bits;
  const std::unique_ptr<float, twin::Free> gradients, residual, floats;
  const std::unique_ptr<uint8_t, twin::Free> coded, received;
  float *const g = gradients.get(), *const r = residual.get(), *const out = floats.get();
  uint8_t *const wire = coded.get(), *const peer = received.get();
  float threshold = 0;
  size_t step = 0;
};

using Body = void (*)(Arrays&);
struct Operation {
  Body codec, twin;
};

const std::map<std::string, Operation> kOperations = {
    {"encode_ef",
     {[](Arrays& a) {
        a.codecs.Encode(a.spec, {a.g, a.n}, a.r, a.wire);
      },
      [](Arrays& a) { a.Twin({.gradient = a.g, .residual = a.r, .codes_out = a.wire}); }}},
    {"encode",
     {[](Arrays& a) {
        a.codecs.Encode(a.spec, {a.g, a.n}, nullptr, a.wire);
      },
      [](Arrays& a) { a.Twin({.gradient = a.g, .codes_out = a.wire}); }}},
    {"decode",
     {[](Arrays& a) {
        a.codecs.Decode(a.spec, a.peer, {a.out, a.n});
      },
      [](Arrays& a) { a.Twin({.codes_in = a.peer, .floats = a.out}); }}},
    {"decode_add",
     {[](Arrays& a) {
        a.codecs.DecodeAdd(a.spec, a.peer, {a.out, a.n});
      },
      [](Arrays& a) { a.Twin({.codes_in = a.peer, .floats = a.out, .add = true}); }}},
    {"reduce_requant", {[](Arrays& a) { a.Reduce(1); }, [](Arrays& a) { a.TwinOfReduce(1); }}},
    {"reduce8_requant", {[](Arrays& a) { a.Reduce(7); }, [](Arrays& a) { a.TwinOfReduce(7); }}},
    // topk with the last step's threshold. It has few entries.
    {"select",
     {[](Arrays& a) {
        a.codecs.Encode(a.spec, {.gradient = {a.NextGradient(), a.n},
                                 .residual = a.r,
                                 .wire = a.wire,
                                 .threshold = &a.threshold});
      },
      [](Arrays& a) {
        twin::Move({.gradient = a.NextGradient(), .residual = a.r, .numel = a.n});
      }}},
    {"rounding",
     {[](Arrays& a) { a.Encode(Rounding::kStochastic); },
      [](Arrays& a) { a.Encode(Rounding::kNearest); }}},
};

double Seconds(Body body, Arrays& arrays, size_t rounds) {
  const double begin = Now();
  for (size_t i = 0; i < rounds; ++i) body(arrays);
  return (Now() - begin) / static_cast<double>(rounds);
}

void Run(benchmark::State& state, const std::string& op, const CodecSpec& spec, size_t bytes) {
  const size_t n = bytes / sizeof(float), rounds = std::max<size_t>(1, kBytesPerRepetition / bytes);
  const Operation& operation = kOperations.at(op);
  // Each side has its own arrays, so that residuals stay what each side made them.
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
