// Times our allreduce and Gloo's fp32 allreduce, interleaved in one run; one process per rank.
//
//   allreduce_bench FOLDER REPETITIONS SMALLEST LARGEST ROWS
//
// RANK, WORLD_SIZE and GLOO_SOCKET_IFNAME come from the environment, as bench/lab.py sets them.
// Ranks meet in FOLDER, where rank 0 writes times.json: a line for each size in bytes from SMALLEST
// to LARGEST, with the seconds of every repetition. ROWS: codecs followed by settings, such as
// "int4,int4+hierarchical+auto": "checksum", a topology, a transport, "congestion=" with a
// control's name, "chunk=" with bytes, or "loops=" with a number.
//
// A repetition is one allreduce after a barrier. For tensors up to 64 KiB it is the mean of twenty
// in a row: a barrier releases the ranks at times that differ by more than such a tensor takes.
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "bench/times.h"
#include "integrations/c/thinwire.h"

namespace {

using thinwire::Now;

constexpr size_t kSmall = 65536, kMiddle = 1048576;
constexpr int kSmallCalls = 20;
constexpr const char* kGloo = "Gloo";
constexpr size_t kSizes[] = {64,     1024,    4096,    16384,    65536,
                             262144, 1048576, 4194304, 16777216, 67108864};

// Gloo's own fp32 allreduce, as commonly used. Ranks meet in `folder`; it listens on `interface`.
class GlooBaseline {
 public:
  GlooBaseline(int rank, int size, const std::string& folder, const std::string& interface)
      : context_(std::make_shared<gloo::rendezvous::Context>(rank, size)) {
    gloo::transport::tcp::attr attr;
    attr.iface = interface;
    auto device = gloo::transport::tcp::CreateDevice(attr);
    gloo::rendezvous::FileStore store(folder);
    context_->connectFullMesh(store, device);
  }

  void AllReduce(float* values, size_t count) {  // the sum, in place
    gloo::AllreduceOptions options(context_);
    options.setOutput(values, count);
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
    options.setTag(++tag_);
    gloo::allreduce(options);
  }

  void Broadcast(float* values, size_t count) {  // rank 0's, in place
    gloo::BroadcastOptions options(context_);
    options.setOutput(values, count);
    options.setRoot(0);
    options.setTag(++tag_);
    gloo::broadcast(options);
  }

  void Barrier() {
    gloo::BarrierOptions options(context_);
    options.setTag(++tag_);
    gloo::barrier(options);
  }

 private:
  const std::shared_ptr<gloo::rendezvous::Context> context_;
  uint32_t tag_ = 0;
};

struct Setup {
  int rank, size, repetitions;
  std::string folder, interface;
};

void Check(tw_status status) {
  if (status == TW_OK) return;
  std::fprintf(stderr, "%s\n", tw_last_error());
  std::exit(1);
}

std::vector<std::string> Split(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, between);) parts.push_back(part);
  return parts;
}

// Applies one of the settings after a codec; the text must outlive the options.
void Set(const std::string& setting, tw_options* options) {
  constexpr std::string_view kChunk = "chunk=", kCongestion = "congestion=", kLoops = "loops=";
  if (setting == "checksum") {
    options->checksum = 1;
  } else if (setting.starts_with(kChunk)) {
    options->chunk_bytes = std::strtoull(setting.c_str() + kChunk.size(), nullptr, 10);
  } else if (setting.starts_with(kLoops)) {
    options->loops = std::strtoull(setting.c_str() + kLoops.size(), nullptr, 10);
  } else if (setting.starts_with(kCongestion)) {
    options->congestion = setting.c_str() + kCongestion.size();
  } else if (setting == "flat" || setting == "grid" || setting == "hierarchical") {
    options->topology = setting.c_str();
  } else {
    options->transport = setting.c_str();
  }
}

tw_comm* Connect(const Setup& setup, const std::string& row) {
  tw_options options;
  tw_options_init(&options);
  options.rank = setup.rank;
  options.size = setup.size;
  options.store_path = setup.folder.c_str();
  std::string group = row;  // part of a file's name
  std::replace_if(
      group.begin(), group.end(), [](char c) { return !std::isalnum(c); }, '_');
  options.group = group.c_str();
  const std::vector<std::string> parts = Split(row, '+');
  options.codec = parts[0].c_str();
  options.interface_name = setup.interface.c_str();
  for (size_t i = 1; i < parts.size(); ++i) Set(parts[i], &options);
  options.ucx_library = std::getenv("THINWIRE_UCX_LIB");
  tw_comm* comm = nullptr;
  Check(tw_comm_create(&options, &comm));
  if (setup.rank == 0) {
    char way[256], planes[256];
    Check(tw_comm_topology(comm, way, sizeof(way)));
    Check(tw_comm_transport(comm, planes, sizeof(planes)));
    std::fprintf(stderr, "%s: %s; %s\n", row.c_str(), way, planes);
  }
  return comm;
}

// The seconds of a call; for small tensors the mean of kSmallCalls in a row.
double Seconds(size_t bytes, const std::function<void()>& call) {
  const int calls = bytes <= kSmall ? kSmallCalls : 1;
  const double begin = Now();
  for (int i = 0; i < calls; ++i) call();
  return (Now() - begin) / calls;
}

// A call for a large tensor has a name, so it keeps residuals, as in training.
void AllReduce(tw_comm* comm, std::vector<float>& values) {
  float* const data = values.data();
  const size_t n = values.size();
  if (n * sizeof(float) <= kSmall) {
    return Check(tw_all_reduce(data, data, n, TW_F32, TW_MEAN, comm, nullptr));
  }
  tw_work* work = nullptr;
  const std::string name = std::to_string(n);
  Check(tw_all_reduce_async(data, data, n, TW_F32, TW_MEAN, comm, nullptr, name.c_str(), 0, &work));
  Check(tw_wait(work));
}

// Another gradient in each step, as in training: the same noise, shifted. The behaviour of a codec
// with feedback depends on it: if all steps were alike, residuals would grow in step, and topk
// would find another threshold each time.
class Gradients {
 public:
  Gradients(int rank, size_t n) : n_(n), noise_(n + kShifts * kShift) {
    std::mt19937 random(static_cast<unsigned>(rank));
    std::normal_distribution<float> normal(0, 1e-3f);
    for (float& value : noise_) value = normal(random);
  }
  std::span<const float> OfStep(int step) const {
    return std::span(noise_).subspan(kShift * ((step + kShifts) % kShifts), n_);
  }

 private:
  static constexpr size_t kShift = 256, kShifts = 61;
  const size_t n_;
  std::vector<float> noise_;
};

// Elements of a result, over all ranks, that differ from rank 0's in any bit; for fp32 and bf16
// also those that are further from the fp64 mean than the format and n - 1 sums in fp32 allow.
size_t Wrong(const Setup& setup, GlooBaseline& gloo, const std::string& codec, int step,
             const std::vector<float>& values) {
  std::vector<float> first = values;
  gloo.Broadcast(first.data(), first.size());
  std::vector<double> mean(values.size()), most(values.size());
  const double precision = codec == "fp32" ? 0x1p-23 : codec == "bf16" ? 0x1p-7 : 0;
  for (int rank = 0; precision > 0 && rank < setup.size; ++rank) {
    const Gradients all(rank, values.size());
    const std::span<const float> gradient = all.OfStep(step);
    for (size_t i = 0; i < values.size(); ++i) {
      mean[i] += static_cast<double>(gradient[i]) / setup.size;
      most[i] = std::max(most[i], std::abs(static_cast<double>(gradient[i])));
    }
  }
  size_t wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const bool differs = std::memcmp(&values[i], &first[i], sizeof(float)) != 0;
    const bool far =
        precision > 0 && !(std::abs(values[i] - mean[i]) <= setup.size * precision * most[i]);
    wrong += differs || far ? 1 : 0;
  }
  float sum = static_cast<float>(wrong);
  gloo.AllReduce(&sum, 1);
  return static_cast<size_t>(sum);
}

// Writes a line of times.json: the wrong elements of every row, and the seconds of Gloo and of each
// row.
void Measure(const Setup& setup, GlooBaseline& gloo, std::map<std::string, tw_comm*>& comms,
             size_t bytes, std::ofstream& out) {
  const size_t n = bytes / sizeof(float);
  const Gradients gradients(setup.rank, n);
  std::map<std::string, std::vector<double>> times;
  const int repetitions =
      bytes > kSmall && bytes <= kMiddle ? setup.repetitions * 20 : setup.repetitions;
  for (int i = -2; i < repetitions; ++i) {
    const auto keep = [&](const std::string& who, double seconds) {
      if (i >= 0) times[who].push_back(seconds);
    };
    const std::span<const float> gradient = gradients.OfStep(i);
    std::vector<float> values(gradient.begin(), gradient.end());
    gloo.Barrier();
    keep(kGloo, Seconds(bytes, [&] { gloo.AllReduce(values.data(), n); }));
    for (auto& [row, comm] : comms) {
      values.assign(gradient.begin(), gradient.end());
      gloo.Barrier();
      keep(row, Seconds(bytes, [&, to = comm] { AllReduce(to, values); }));
    }
  }
  out << "{\"bytes\": " << bytes;
  // Once more, untimed: the timed calls above are the same.
  for (auto& [row, comm] : comms) {
    const std::span<const float> gradient = gradients.OfStep(repetitions);
    std::vector<float> values(gradient.begin(), gradient.end());
    Check(tw_all_reduce(values.data(), values.data(), n, TW_F32, TW_MEAN, comm, nullptr));
    const size_t wrong = Wrong(setup, gloo, Split(row, '+')[0], repetitions, values);
    out << ", \"" << row << " wrong\": " << wrong;
  }
  for (const auto& [row, seconds] : times) {
    out << ", \"" << row << "\": ";
    for (size_t i = 0; i < seconds.size(); ++i) out << (i == 0 ? "[" : ", ") << seconds[i];
    out << "]";
  }
  out << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  const char *const rank = std::getenv("RANK"), *const size = std::getenv("WORLD_SIZE"),
                    *const interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (argc != 6 || rank == nullptr || size == nullptr || interface == nullptr) {
    std::fprintf(stderr,
                 "usage: %s FOLDER REPETITIONS SMALLEST LARGEST ROWS\n"
                 "It requires RANK, WORLD_SIZE and GLOO_SOCKET_IFNAME: run python -m bench "
                 "allreduce, or this program by python -m bench.lab\n",
                 argv[0]);
    return 2;
  }
  const Setup setup{std::atoi(rank), std::atoi(size), std::atoi(argv[2]), argv[1], interface};
  const std::string gloo_folder = setup.folder + "/gloo";
  std::filesystem::create_directories(gloo_folder);
  GlooBaseline gloo(setup.rank, setup.size, gloo_folder, setup.interface);
  std::map<std::string, tw_comm*> comms;
  for (const std::string& row : Split(argv[5], ',')) comms[row] = Connect(setup, row);
  std::ofstream out(setup.rank == 0 ? setup.folder + "/times.json" : "/dev/null");
  for (const size_t bytes : kSizes) {
    const size_t least = std::strtoull(argv[3], nullptr, 10);
    const size_t most = std::strtoull(argv[4], nullptr, 10);
    if (least <= bytes && bytes <= most) Measure(setup, gloo, comms, bytes, out);
  }
  for (auto& [row, comm] : comms) tw_comm_destroy(comm);
  return 0;
}
