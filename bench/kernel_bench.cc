// The kernels, checked and timed.
//
//   kernel_bench               times every operation against its twin on the first GPU: JSON
//   kernel_bench --device      names that GPU, or says why there is none
//   kernel_bench --host_only   runs the kernels on CPU threads, thread after thread, for all
//                              lengths from 0 to 4097 and all codecs, and compares every byte
//
// Names are OP/SPEC/BYTES, BYTES of fp32. ratio_to_twin is the median time over the twin's, the two
// interleaved, with other, clean data in the L2 cache before each; spread is the middle half of the
// repetitions' ratios; terabytes_per_second counts what is read and written. A codec is timed only
// after its bytes were compared with the reference's.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench/kernel_timer.h"
#include "compress/backend.h"
#include "compress/codec_list.h"
#include "kernels/device.h"
#include "kernels/host_device.h"

namespace thinwire {
namespace {

constexpr int kRepetitions = 31;
constexpr int kRanks = 8;  // of a reduction
constexpr size_t kAlignment = 256;
constexpr size_t kDrawn = (size_t{1} << 22) + 1;
// All codecs with kernels, and the options that have code of their own.
std::vector<std::string> Specs() {
  std::vector<std::string> specs;
  for (const CodecTraits& codec : kCodecs) {
    if (codec.has_kernels) specs.emplace_back(codec.name);
  }
  specs.insert(specs.end(), {"int4:hadamard=1", "int8:rounding=stochastic"});
  return specs;
}

// A device's memory of one kind of array, with a copy on the host.
template <typename T>
class Array {
 public:
  Array(Device& device, DeviceStream& stream, size_t count)
      : stream_(stream),
        count_(count),
        device_(*device.Allocate(std::max<size_t>(count, 1) * sizeof(T))),
        host_(*device.AllocatePinned(std::max<size_t>(count, 1) * sizeof(T))) {}

  T* data() { return reinterpret_cast<T*>(device_.get()); }
  T* host() { return reinterpret_cast<T*>(host_.get()); }
  void Put() { stream_.Copy(data(), host(), count_ * sizeof(T)); }
  bool Equals(const std::vector<T>& expected) {
    stream_.Copy(host(), data(), count_ * sizeof(T));
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    if (const absl::Status status = stream_.Synchronize(end); !status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      return false;
    }
    return count_ == 0 || std::memcmp(host(), expected.data(), count_ * sizeof(T)) == 0;
  }

 private:
  DeviceStream& stream_;
  const size_t count_;
  const DeviceMemory device_, host_;
};

struct Arrays {
  Arrays(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel)
      : gradient(device, stream, numel),
        floats(device, stream, numel),
        out(device, stream, numel),
        threshold(device, stream, 1),
        wire(device, stream, EncodedBytes(spec, numel)),
        scratch_words(spec.traits().entries() ? stream.backend().EntryScratchWords(spec, numel)
                                              : 0),
        scratch(device, stream, scratch_words) {
    *threshold.host() = 0.0f;
    threshold.Put();
    std::mt19937_64 random(numel + 1);
    std::normal_distribution<float> normal(0.0f, 1e-3f);
    for (size_t i = 0; i < numel; ++i) {
      const bool drawn = i < kDrawn;  // then again: draws of 512 MiB take seconds
      gradient.host()[i] = drawn ? normal(random) : gradient.host()[i - kDrawn];
      floats.host()[i] = drawn ? 0.3f * normal(random) : floats.host()[i - kDrawn];
    }
    gradient.Put();
    floats.Put();
  }

  // topk's, which starts from the threshold of the call before, or searches.
  enum class Guess { kNone, kCarried };
  EncodeExtras Extras(Guess guess) {
    EncodeExtras extras;
    extras.scratch = {scratch.data(), scratch_words};
    if (guess == Guess::kCarried) extras.threshold = threshold.data();
    return extras;
  }

  Array<float> gradient, floats, out, threshold;
  Array<uint8_t> wire;
  const size_t scratch_words;
  Array<uint32_t> scratch;
};

// Encodes with feedback, decodes, and compares with the reference.
bool Agrees(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel) {
  Arrays arrays(device, stream, spec, numel);
  std::vector<float> gradient(arrays.gradient.host(), arrays.gradient.host() + numel);
  std::vector<float> residual(arrays.floats.host(), arrays.floats.host() + numel);
  std::vector<uint8_t> wire(EncodedBytes(spec, numel));
  std::vector<float> decoded(numel);
  ScalarBackend().Encode(spec, {gradient.data(), numel}, residual.data(), wire.data());
  ScalarBackend().Decode(spec, wire.data(), {decoded.data(), numel});
  const Backend& codecs = stream.backend();
  codecs.Encode(spec, {arrays.gradient.data(), numel}, arrays.floats.data(), arrays.wire.data(),
                arrays.Extras(Arrays::Guess::kNone));
  codecs.Decode(spec, arrays.wire.data(), {arrays.out.data(), numel});
  return arrays.wire.Equals(wire) && arrays.floats.Equals(residual) && arrays.out.Equals(decoded);
}

int CheckOnHost() {
  constexpr size_t kLengths = 4098;
  const std::shared_ptr<Device> device = MakeDevice(kernels::HostDeviceApi(), 0, "host:0");
  const std::unique_ptr<DeviceStream> stream = *device->MakeStream();
  int failures = 0;
  for (const std::string& name : Specs()) {
    const char* const text = name.c_str();
    const CodecSpec spec = *CodecSpec::Parse(name);
    size_t wrong = 0, first = 0;
    for (size_t numel = 0; numel < kLengths; ++numel) {
      if (Agrees(*device, *stream, spec, numel)) continue;
      if (wrong++ == 0) first = numel;
    }
    std::printf("%-26s %zu of %zu lengths agree", text, kLengths - wrong, kLengths);
    std::printf(wrong == 0 ? "\n" : "; the first that does not: %zu\n", first);
    failures += wrong > 0;
  }
  return failures;
}

struct Result {
  std::string name;
  double milliseconds, twin, ratio, low, high;
  size_t bytes;  // read and written
};

Result Measure(KernelTimer& timer, const std::string& name, size_t bytes,
               const std::function<void()>& kernel, const std::function<void()>& twin) {
  std::vector<double> ours, theirs, ratios;
  for (int i = -2; i < kRepetitions; ++i) {  // the first ones warm up
    const double a = timer.Time(kernel), b = timer.Time(twin);
    if (i < 0) continue;
    ours.push_back(a);
    theirs.push_back(b);
    ratios.push_back(a / b);
  }
  for (auto* values : {&ours, &theirs, &ratios}) std::sort(values->begin(), values->end());
  const size_t middle = kRepetitions / 2, quarter = kRepetitions / 4;
  return {name,
          ours[middle],
          theirs[middle],
          ours[middle] / theirs[middle],
          ratios[quarter],
          ratios[kRepetitions - 1 - quarter],
          bytes};
}

// All operations of one codec and size.
void MeasureCodec(Device& device, DeviceStream& stream, KernelTimer& timer, const CodecSpec& spec,
                  size_t numel, std::vector<Result>* results) {
  Arrays a(device, stream, spec, numel);
  const Backend& codecs = stream.backend();
  const int bits = spec.traits().code_bits;
  const TensorView gradient{a.gradient.data(), numel}, out{a.out.data(), numel};
  const std::string suffix = "/" + spec.ToString() + "/" + std::to_string(numel * sizeof(float));
  const auto add = [&](const char* op, const std::function<void()>& kernel,
                       const TwinShape& shape) {
    const int floats = shape.reads_gradient + shape.writes_floats + shape.adds;
    const size_t moved = floats * numel * sizeof(float) + EncodedBytes(spec, numel);
    results->push_back(
        Measure(timer, op + suffix, moved, kernel, [&] { timer.Twin(shape, numel); }));
  };
  add("encode_ef", [&] { codecs.Encode(spec, gradient, a.floats.data(), a.wire.data()); },
      {true, true, true, false, true, bits});
  add("encode", [&] { codecs.Encode(spec, gradient, nullptr, a.wire.data()); },
      {true, false, false, false, true, bits});
  add("decode", [&] { codecs.Decode(spec, a.wire.data(), out); },
      {false, true, false, true, false, bits});
  add("decode_add",
      [&] {
        codecs.DecodeAdd(spec, a.wire.data(), {a.out.data(), numel});
      },
      {false, true, true, true, false, bits});

  // Against a copy of as many bytes: seven shards and the own one are read, the residual is read
  // and written, the result and its bytes are written.
  const size_t wire_bytes = EncodedBytes(spec, numel);
  const DeviceMemory copies = *device.Allocate((kRanks - 1) * (wire_bytes + kAlignment));
  std::vector<const uint8_t*> wires = {nullptr};
  for (int rank = 1; rank < kRanks; ++rank) {
    const size_t stride = (wire_bytes + kAlignment - 1) / kAlignment * kAlignment;
    uint8_t* const wire = copies.get() + (rank - 1) * stride;
    stream.Copy(wire, a.wire.data(), wire_bytes);
    wires.push_back(wire);
  }
  const size_t moved = kRanks * wire_bytes + 4 * numel * sizeof(float);
  ReduceArgs args;
  args.up = args.down = spec;
  args.wires = wires;
  args.own = gradient;
  args.scale = 1.0f / kRanks;
  args.residual = a.floats.data();
  args.out = out;
  Array<uint8_t> result(device, stream, EncodedBytes(spec, numel));
  args.wire_out = result.data();
  results->push_back(Measure(
      timer, "reduce8" + suffix, moved, [&] { codecs.Reduce(args); },
      [&] { timer.Copy(moved / 2); }));
}

// The same of topk, against copies of as many bytes. Its encoder reads an element once if the
// threshold of the call before holds, as it does from step to step of a training.
void MeasureEntries(Device& device, DeviceStream& stream, KernelTimer& timer, const CodecSpec& spec,
                    size_t numel, std::vector<Result>* results) {
  Arrays a(device, stream, spec, numel);
  const Backend& codecs = stream.backend();
  const TensorView gradient{a.gradient.data(), numel};
  const std::span<float> out(a.out.data(), numel);
  const std::string suffix = "/" + spec.ToString() + "/" + std::to_string(numel * sizeof(float));
  const size_t wire_bytes = EncodedBytes(spec, numel);
  const auto add = [&](const char* op, size_t floats, size_t wires,
                       const std::function<void()>& kernel) {
    const size_t moved = floats * numel * sizeof(float) + wires * wire_bytes;
    results->push_back(Measure(timer, op + suffix, moved, kernel, [&] { timer.Copy(moved / 2); }));
  };
  add("encode_ef", 3, 1, [&] {
    codecs.Encode(spec, gradient, a.floats.data(), a.wire.data(),
                  a.Extras(Arrays::Guess::kCarried));
  });
  add("encode", 1, 1, [&] {
    codecs.Encode(spec, gradient, nullptr, a.wire.data(), a.Extras(Arrays::Guess::kNone));
  });
  add("decode", 1, 1, [&] { codecs.Decode(spec, a.wire.data(), {out.data(), numel}); });
  add("decode_add", 2, 1, [&] { codecs.DecodeAdd(spec, a.wire.data(), out); });
  const std::vector<const uint8_t*> wires(kRanks, a.wire.data());
  add("reduce8", 1, kRanks, [&] { codecs.SumEntries(spec, wires, 1.0f / kRanks, out); });
}

// One launch of many chunks of 1 MiB against one of a single shard.
void MeasureChunks(Device& device, DeviceStream& stream, KernelTimer& timer, size_t numel,
                   std::vector<Result>* results) {
  const CodecSpec spec = *CodecSpec::Parse("int4");
  constexpr size_t kChunk = (size_t{1} << 20) / sizeof(float);
  Arrays a(device, stream, spec, numel);
  const size_t chunk_bytes = EncodedBytes(spec, kChunk);
  Array<uint8_t> wires(device, stream, numel / kChunk * chunk_bytes);
  std::vector<EncodeArgs> chunks;
  for (size_t i = 0; i < numel / kChunk; ++i) {
    const TensorView part{a.gradient.data() + i * kChunk, kChunk};
    chunks.push_back({part, a.floats.data() + i * kChunk, wires.data() + i * chunk_bytes});
  }
  const Backend& codecs = stream.backend();
  results->push_back(Measure(
      timer, "chunks_to_one/int4/" + std::to_string(numel * sizeof(float)),
      3 * numel * sizeof(float) + EncodedBytes(spec, numel),
      [&] { codecs.EncodeAll(spec, chunks); },
      [&] {
        codecs.Encode(spec, {a.gradient.data(), numel}, a.floats.data(), a.wire.data());
      }));
}

void Print(const std::string& device, const std::vector<Result>& results) {
  std::printf("{\n \"device\": \"%s\",\n \"benchmarks\": [\n", device.c_str());
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    std::printf(
        "  {\"name\": \"%s\", \"milliseconds\": %.5f, \"twin_milliseconds\": %.5f, "
        "\"ratio_to_twin\": %.4f, \"spread\": [%.4f, %.4f], "
        "\"terabytes_per_second\": %.3f, \"twin_terabytes_per_second\": %.3f}%s\n",
        r.name.c_str(), r.milliseconds, r.twin, r.ratio, r.low, r.high,
        r.bytes / r.milliseconds * 1e-9, r.bytes / r.twin * 1e-9,
        i + 1 < results.size() ? "," : "");
  }
  std::printf(" ]\n}\n");
}

int OnGpu(bool only_name) {
  absl::StatusOr<std::unique_ptr<KernelTimer>> timer = MakeKernelTimer();
  absl::StatusOr<std::shared_ptr<Device>> device = OpenDevice("cuda", "libthinwire_cuda.so");
  for (const absl::Status& status : {timer.status(), device.status()}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return 1;
  }
  if (only_name) {
    std::printf("%s\n", (*timer)->device().c_str());
    return 0;
  }
  const std::unique_ptr<DeviceStream> stream = (*device)->Adopt((*timer)->stream());
  std::vector<Result> results;
  for (const std::string& name : Specs()) {
    const char* const text = name.c_str();
    const CodecSpec spec = *CodecSpec::Parse(name);
    for (const size_t numel : {size_t{1000003}, size_t{4097}}) {
      if (Agrees(**device, *stream, spec, numel)) continue;
      std::fprintf(stderr, "%s of %zu elements: not the reference's bytes\n", text, numel);
      return 1;
    }
    for (const size_t bytes : {size_t{64} << 20, size_t{512} << 20}) {
      const auto measure = spec.traits().entries() ? MeasureEntries : MeasureCodec;
      measure(**device, *stream, **timer, spec, bytes / sizeof(float), &results);
    }
  }
  MeasureChunks(**device, *stream, **timer, (size_t{256} << 20) / sizeof(float), &results);
  Print((*timer)->device(), results);
  return 0;
}

}  // namespace
}  // namespace thinwire

int main(int argc, char** argv) {
  const std::string option = argc == 2 ? argv[1] : "";
  if (argc == 1) return thinwire::OnGpu(false);
  if (option == "--device") return thinwire::OnGpu(true);
  if (option == "--host_only") return thinwire::CheckOnHost();
  std::printf("usage: kernel_bench [--device | --host_only]\n");
  return option == "--help" ? 0 : 2;
}
