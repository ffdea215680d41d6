// Checks and times the kernels.
//
//   kernel_bench               times every operation against its twin on the first GPU: JSON
//   kernel_bench --device      names that GPU, or says why there is none
//   kernel_bench --profile     runs kernels of each kind once or twice, for a profiler
//
// Names are OP/SPEC/BYTES, BYTES of fp32; for operations on chunks, of one chunk. ratio_to_twin is
// the median time over the twin's, the two interleaved, with other, clean data in the L2 cache
// before each; spread is the middle half of the repetitions' ratios; terabytes_per_second counts
// bytes read and written. A codec is timed only after its bytes were compared with the reference's.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/kernel_timer.h"
#include "bench/times.h"
#include "compress/backend.h"
#include "compress/codec_list.h"
#include "kernels/device.h"

namespace thinwire {
namespace {

constexpr int kRepetitions = 31;
constexpr int kRanks = 8;  // per reduction
constexpr size_t kAlignment = 256;
constexpr size_t kDrawn = (size_t{1} << 22) + 1;

// A device array and a copy on the host.
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

// Memory for the operations of a codec.
struct Arrays {
  Arrays(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel)
      : gradient(device, stream, numel),
        floats(device, stream, numel),
        out(device, stream, numel),
        threshold(device, stream, 1),
        wire(device, stream, EncodedBytes(spec, numel)) {
    *threshold.host() = 0.0f;
    threshold.Put();
    std::mt19937_64 random(numel + 1);
    std::normal_distribution<float> normal(0.0f, 1e-3f);
    for (size_t i = 0; i < numel; ++i) {
      const bool drawn = i < kDrawn;  // then repeated: draws of 512 MiB take seconds
      gradient.host()[i] = drawn ? normal(random) : gradient.host()[i - kDrawn];
      floats.host()[i] = drawn ? 0.3f * normal(random) : floats.host()[i - kDrawn];
    }
    gradient.Put();
    floats.Put();
  }

  Array<float> gradient, floats, out, threshold;
  Array<uint8_t> wire;
};

// A reduction of copies of one wire and of this rank's shard.
class Reduction {
 public:
  Reduction(Device& device, DeviceStream& stream, const CodecSpec& spec, Arrays& a, size_t numel)
      : stride_((EncodedBytes(spec, numel) + kAlignment - 1) / kAlignment * kAlignment),
        copies_(*device.Allocate((kRanks - 1) * stride_)),
        result_(device, stream, EncodedBytes(spec, numel)) {
    for (int rank = 1; rank < kRanks; ++rank) {
      uint8_t* const wire = copies_.get() + (rank - 1) * stride_;
      stream.Copy(wire, a.wire.data(), EncodedBytes(spec, numel));
      wires_.push_back(wire);
    }
    args_.up = args_.down = spec;
    args_.wires = wires_;
    args_.own = {a.gradient.data(), numel};
    args_.scale = 1.0f / kRanks;
    args_.residual = a.floats.data();
    args_.out = {a.out.data(), numel};
    args_.wire_out = result_.data();
  }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  const ReduceArgs& args() const { return args_; }

 private:
  const size_t stride_;
  const DeviceMemory copies_;
  std::vector<const uint8_t*> wires_ = {nullptr};
  Array<uint8_t> result_;
  ReduceArgs args_;
};

// All codecs with kernels, and the option with code of its own.
std::vector<std::string> Specs() {
  std::vector<std::string> specs;
  for (const CodecTraits& codec : kCodecs) {
    if (codec.has_kernels) specs.emplace_back(codec.name);
  }
  specs.emplace_back("int4:hadamard=1");
  return specs;
}

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
  codecs.Encode(spec, {arrays.gradient.data(), numel}, arrays.floats.data(), arrays.wire.data());
  codecs.Decode(spec, arrays.wire.data(), {arrays.out.data(), numel});
  return arrays.wire.Equals(wire) && arrays.floats.Equals(residual) && arrays.out.Equals(decoded);
}

struct Result {
  std::string name;
  double milliseconds, twin, ratio, low, high;
  size_t bytes;  // read and written
};

// The results so far, each an operation timed against another.
class Table {
 public:
  explicit Table(KernelTimer& timer) : timer_(timer) {}

  // Sets the codec and elements of the next rows, whose `floats` and `wires` count arrays of that
  // size.
  void Begin(const CodecSpec& spec, size_t numel) {
    numel_ = numel;
    wire_bytes_ = EncodedBytes(spec, numel);
    suffix_ = absl::StrCat("/", spec.ToString(), "/", numel * sizeof(float));
  }
  void Against(const std::function<void()>& twin, const char* op, size_t floats, size_t wires,
               const std::function<void()>& kernel,
               const std::function<void()>& prepare = nullptr) {
    std::vector<double> ours, theirs, ratios;
    for (int i = -2; i < kRepetitions; ++i) {  // the first ones warm up
      const double a = timer_.Time(kernel, prepare), b = timer_.Time(twin);
      if (i < 0) continue;
      ours.push_back(a);
      theirs.push_back(b);
      ratios.push_back(a / b);
    }
    const double typical = Quantile(ours, 0.5), of_twin = Quantile(theirs, 0.5);
    results_.push_back({op + suffix_, typical, of_twin, typical / of_twin, Quantile(ratios, 0.25),
                        Quantile(ratios, 0.75), Bytes(floats, wires)});
  }
  void AgainstTwin(const char* op, const TwinShape& shape, const std::function<void()>& kernel) {
    const int floats = shape.reads_gradient + shape.writes_floats + shape.adds;
    Against([&] { timer_.Twin(shape, numel_); }, op, floats, 1, kernel);
  }
  // Against a copy that reads and writes as many bytes.
  void AgainstCopy(const char* op, size_t floats, size_t wires, const std::function<void()>& kernel,
                   const std::function<void()>& prepare = nullptr) {
    Against([&] { timer_.Copy(Bytes(floats, wires) / 2); }, op, floats, wires, kernel, prepare);
  }
  void Print() const;

 private:
  size_t Bytes(size_t floats, size_t wires) const {
    return floats * numel_ * sizeof(float) + wires * wire_bytes_;
  }

  KernelTimer& timer_;
  size_t numel_ = 0, wire_bytes_ = 0;
  std::string suffix_;
  std::vector<Result> results_;
};

// Measures all operations of one codec and size.
void MeasureCodec(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel,
                  Table* table) {
  Arrays a(device, stream, spec, numel);
  const Backend& codecs = stream.backend();
  const int bits = spec.traits().code_bits;
  const TensorView gradient{a.gradient.data(), numel}, out{a.out.data(), numel};
  const std::span<float> floats(a.out.data(), numel);
  table->Begin(spec, numel);
  table->AgainstTwin("encode_ef", {true, true, true, false, true, bits},
                     [&] { codecs.Encode(spec, gradient, a.floats.data(), a.wire.data()); });
  table->AgainstTwin("encode", {true, false, false, false, true, bits},
                     [&] { codecs.Encode(spec, gradient, nullptr, a.wire.data()); });
  table->AgainstTwin("decode", {false, true, false, true, false, bits},
                     [&] { codecs.Decode(spec, a.wire.data(), out); });
  table->AgainstTwin("decode_add", {false, true, true, true, false, bits},
                     [&] { codecs.DecodeAdd(spec, a.wire.data(), floats); });

  // Gradient, velocity and residual are read, the residual is written. The contents of `out` serve
  // as the velocity.
  const EncodeArgs shard{.gradient = gradient,
                         .residual = a.floats.data(),
                         .wire = a.wire.data(),
                         .momentum = {.beta = 0.9f, .velocity = a.out.data()}};
  table->AgainstCopy("encode_momentum", 4, 1, [&] { codecs.EncodeAll(spec, {&shard, 1}); });
  // Seven wires and this rank's shard are read, the residual is read and written, the result and
  // its bytes are written.
  Reduction reduction(device, stream, spec, a, numel);
  table->AgainstCopy("reduce8", 4, kRanks, [&] { codecs.Reduce(reduction.args()); });
}

// The same for topk, against copies of as many bytes. Its encoder reads an element once if the
// threshold of the previous call holds, as it does from step to step in training: so every call
// with feedback has the residual of the first call. If it kept its own, one gradient would be added
// again and again, and a tenth of all elements would reach the threshold.
void MeasureEntries(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel,
                    Table* table) {
  Arrays a(device, stream, spec, numel);
  const TensorView gradient{a.gradient.data(), numel};
  const EncodeArgs shard{.gradient = gradient,
                         .residual = a.floats.data(),
                         .wire = a.wire.data(),
                         .threshold = a.threshold.data()};
  const std::unique_ptr<Rehearsal> rehearsal = device.Rehearse();
  rehearsal->backend().Encode(spec, shard);
  const DeviceMemory room = *device.Allocate(rehearsal->room());
  const std::unique_ptr<Backend> in_room = stream.BackendIn({room.get(), rehearsal->room()});
  const Backend& codecs = *in_room;
  const std::span<float> out(a.out.data(), numel);
  table->Begin(spec, numel);
  const auto encode = [&] { codecs.Encode(spec, shard); };
  table->AgainstCopy("encode_ef", 3, 1, encode, [&] { a.floats.Put(); });
  table->AgainstCopy("encode", 1, 1,
                     [&] { codecs.Encode(spec, gradient, nullptr, a.wire.data()); });
  table->AgainstCopy("decode", 1, 1, [&] {
    codecs.Decode(spec, a.wire.data(), {out.data(), numel});
  });
  table->AgainstCopy("decode_add", 2, 1, [&] { codecs.DecodeAdd(spec, a.wire.data(), out); });
  const std::vector<const uint8_t*> wires(kRanks, a.wire.data());
  table->AgainstCopy("reduce8", 1, kRanks,
                     [&] { codecs.SumEntries(spec, wires, 1.0f / kRanks, out); });
}

// A shard of `numel` elements in chunks, as many per launch as fit: encoding and decoding against
// copies of as many bytes, and encoding against that of one shard.
void MeasureChunks(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel,
                   size_t chunk_bytes, Table* table) {
  const size_t chunk = chunk_bytes / sizeof(float), chunks = numel / chunk;
  const size_t wire_bytes = EncodedBytes(spec, chunk);
  Arrays a(device, stream, spec, numel);
  Array<uint8_t> wires(device, stream, chunks * wire_bytes);
  std::vector<EncodeArgs> encoded;
  std::vector<DecodeArgs> decoded;
  for (size_t i = 0; i < chunks; ++i) {
    const size_t at = i * chunk;
    uint8_t* const wire = wires.data() + i * wire_bytes;
    encoded.push_back({{a.gradient.data() + at, chunk}, a.floats.data() + at, wire});
    decoded.push_back({wire, {a.out.data() + at, chunk}});
  }
  const Backend& codecs = stream.backend();
  table->Begin(spec, chunk);
  const auto encode = [&] { codecs.EncodeAll(spec, encoded); };
  table->AgainstCopy("encode_chunks", 3 * chunks, chunks, encode);
  table->AgainstCopy("decode_chunks", chunks, chunks, [&] { codecs.DecodeAll(spec, decoded); });
  if (spec.traits().widths()) return;  // one team plans a shard: chunks are faster
  const auto whole = [&] {
    codecs.Encode(spec, {a.gradient.data(), numel}, a.floats.data(), a.wire.data());
  };
  table->Against(whole, "chunks_to_one", 3 * chunks, chunks, encode);
}

void Table::Print() const {
  std::printf("{\n \"device\": \"%s\",\n \"benchmarks\": [\n", timer_.device().c_str());
  for (size_t i = 0; i < results_.size(); ++i) {
    const Result& r = results_[i];
    std::printf(
        "  {\"name\": \"%s\", \"milliseconds\": %.5f, \"twin_milliseconds\": %.5f, "
        "\"ratio_to_twin\": %.4f, \"spread\": [%.4f, %.4f], "
        "\"terabytes_per_second\": %.3f, \"twin_terabytes_per_second\": %.3f}%s\n",
        r.name.c_str(), r.milliseconds, r.twin, r.ratio, r.low, r.high,
        r.bytes / r.milliseconds * 1e-9, r.bytes / r.twin * 1e-9,
        i + 1 < results_.size() ? "," : "");
  }
  std::printf(" ]\n}\n");
}

// One of each kind, the two that compute most, and all of topk and of adaptive, on 64 MiB. In the
// second encoding by topk the threshold holds.
void Profile(Device& device, DeviceStream& stream) {
  const size_t numel = size_t{16} << 20;
  const Backend& codecs = stream.backend();
  const auto encode = [&](const char* text) {
    const CodecSpec spec = *CodecSpec::Parse(text);
    auto arrays = std::make_unique<Arrays>(device, stream, spec, numel);
    codecs.Encode(spec, {arrays->gradient.data(), numel}, arrays->floats.data(),
                  arrays->wire.data());
    return std::pair(spec, std::move(arrays));
  };
  encode("int4:hadamard=1");
  const auto [int8, eights] = encode("int8");
  codecs.DecodeAdd(int8, eights->wire.data(), {eights->out.data(), numel});
  const auto [onebit, bits] = encode("onebit");
  codecs.Decode(onebit, bits->wire.data(), {bits->out.data(), numel});
  Reduction reduction(device, stream, int8, *eights, numel);
  codecs.Reduce(reduction.args());
  encode("adaptive");
  const CodecSpec topk = *CodecSpec::Parse("topk");
  Arrays a(device, stream, topk, numel);
  for (int i = 0; i < 2; ++i) {
    a.floats.Put();
    codecs.Encode(topk, {.gradient = {a.gradient.data(), numel},
                         .residual = a.floats.data(),
                         .wire = a.wire.data(),
                         .threshold = a.threshold.data()});
  }
  codecs.Decode(topk, a.wire.data(), {a.out.data(), numel});
  stream.Synchronize(std::chrono::steady_clock::now() + std::chrono::minutes(1)).IgnoreError();
}

enum class Task { kTime, kName, kProfile };

int OnGpu(Task task) {
  KernelTimer timer;
  const absl::StatusOr<std::shared_ptr<Device>> device = OpenDevice("cuda", "libthinwire_cuda.so");
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  if (task == Task::kName) {
    std::printf("%s\n", timer.device().c_str());
    return 0;
  }
  const std::unique_ptr<DeviceStream> stream = (*device)->Adopt(timer.stream());
  if (task == Task::kProfile) {
    Profile(**device, *stream);
    return 0;
  }
  Table table(timer);
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
      measure(**device, *stream, spec, bytes / sizeof(float), &table);
    }
  }
  for (const char* const text : {"int8", "int4", "adaptive"}) {
    for (const size_t chunk_bytes : {size_t{1} << 20, size_t{4} << 20}) {
      MeasureChunks(**device, *stream, *CodecSpec::Parse(text), size_t{64} << 20, chunk_bytes,
                    &table);
    }
  }
  table.Print();
  return 0;
}

}  // namespace
}  // namespace thinwire

int main(int argc, char** argv) {
  const std::string option = argc == 2 ? argv[1] : "";
  using thinwire::Task;
  if (argc == 1) return thinwire::OnGpu(Task::kTime);
  if (option == "--device") return thinwire::OnGpu(Task::kName);
  if (option == "--profile") return thinwire::OnGpu(Task::kProfile);
  std::printf("usage: kernel_bench [--device | --profile]\n");
  return option == "--help" ? 0 : 2;
}
