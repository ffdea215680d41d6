// What an allreduce costs a machine that all ranks share: one setting, as a line of JSON. The ranks
// are threads of this process, each with a communicator of its own, over Gloo's loopback or in
// memory. bench/scale.py calibrates the simulator with such lines and tests it on others.
//
//   scale_bench RANKS BYTES CHUNK_BYTES [REPETITIONS [gloo|memory [CODEC [TOPOLOGY [LOOPS]]]]]
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "bench/times.h"
#include "integrations/c/thinwire.h"

namespace {

using thinwire::Now;
using thinwire::ProcessorSeconds;
using thinwire::Quantile;

struct Setup {
  int ranks = 2;
  size_t bytes = 0, chunk_bytes = 0;
  int repetitions = 15, loops = 1;
  std::string plane = "gloo", codec = "int4", topology = "auto", folder;
};

void Check(tw_status status) {
  if (status == TW_OK) return;
  std::fprintf(stderr, "%s\n", tw_last_error());
  std::exit(1);
}

tw_comm* Connect(const Setup& setup, int rank) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = setup.ranks;
  if (setup.plane == "memory") {
    options.local_group = "scale";
  } else {
    options.store_path = setup.folder.c_str();
  }
  options.codec = setup.codec.c_str();
  options.topology = setup.topology.c_str();
  options.chunk_bytes = setup.chunk_bytes;
  options.no_raw = 1;
  options.loops = static_cast<size_t>(setup.loops);
  tw_comm* comm = nullptr;
  Check(tw_comm_create(&options, &comm));
  return comm;
}

struct Times {
  std::vector<double> wall, processor;  // the latter of all ranks together
};

void Run(const Setup& setup, int rank, std::barrier<>& all, Times& times) {
  tw_comm* const comm = Connect(setup, rank);
  std::vector<float> values(setup.bytes / sizeof(float));
  constexpr int kWarmup = 2;
  for (int i = -kWarmup; i < setup.repetitions; ++i) {
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = std::sin(static_cast<float>(j % 997) + static_cast<float>(rank));
    }
    all.arrive_and_wait();
    const double wall = Now(), processor = ProcessorSeconds(RUSAGE_SELF);
    tw_work* work = nullptr;
    Check(tw_all_reduce_async(values.data(), values.data(), values.size(), TW_F32, TW_MEAN, comm,
                              nullptr, "g", 0, &work));
    Check(tw_wait(work));
    all.arrive_and_wait();
    if (rank == 0 && i >= 0) {
      times.wall.push_back(Now() - wall);
      times.processor.push_back(ProcessorSeconds(RUSAGE_SELF) - processor);
    }
    all.arrive_and_wait();
  }
  tw_comm_destroy(comm);
}

void Print(const Setup& setup, const Times& times) {
  std::printf(
      "{\"ranks\": %d, \"bytes\": %zu, \"chunk_bytes\": %zu, \"plane\": \"%s\", \"codec\": \"%s\", "
      "\"topology\": \"%s\", "
      "\"repetitions\": %d, \"ms\": %.4f, \"low_ms\": %.4f, \"high_ms\": %.4f, "
      "\"processor_ms\": %.4f}\n",
      setup.ranks, setup.bytes, setup.chunk_bytes, setup.plane.c_str(), setup.codec.c_str(),
      setup.topology.c_str(), setup.repetitions, 1e3 * Quantile(times.wall, 0.5),
      1e3 * Quantile(times.wall, 0.1), 1e3 * Quantile(times.wall, 0.75),
      1e3 * Quantile(times.processor, 0.5));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr,
                 "usage: %s RANKS BYTES CHUNK_BYTES [REPETITIONS [gloo|memory [CODEC [TOPOLOGY "
                 "[LOOPS]]]]]\n",
                 argv[0]);
    return 2;
  }
  Setup setup;
  setup.ranks = std::atoi(argv[1]);
  setup.bytes = std::strtoull(argv[2], nullptr, 10);
  setup.chunk_bytes = std::strtoull(argv[3], nullptr, 10);
  if (argc > 4) setup.repetitions = std::atoi(argv[4]);
  if (argc > 5) setup.plane = argv[5];
  if (argc > 6) setup.codec = argv[6];
  if (argc > 7) setup.topology = argv[7];
  if (argc > 8) setup.loops = std::atoi(argv[8]);
  std::string folder = std::filesystem::temp_directory_path() / "thinwire_scale.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return 1;
  setup.folder = folder;
  std::barrier<> all(setup.ranks);
  Times times;
  std::vector<std::thread> ranks;
  for (int r = 0; r < setup.ranks; ++r) ranks.emplace_back([&, r] { Run(setup, r, all, times); });
  for (std::thread& rank : ranks) rank.join();
  std::filesystem::remove_all(setup.folder);
  Print(setup, times);
  return 0;
}
