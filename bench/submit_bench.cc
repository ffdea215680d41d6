// Microseconds of a submission on the calling thread, of a bucket of many parameters: by its
// handle, and by a call that describes it each time. Two ranks are threads of this process.
//
//   submit_bench [--parameters N] [--steps N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"

namespace {

constexpr int kWorld = 2;
constexpr size_t kNumel = 1000;  // of a parameter

struct Rank {
  tw_comm* comm = nullptr;
  std::vector<float> values;
  std::vector<std::string> names;
  std::vector<tw_segment> segments;
  std::vector<double> by_handle_us, by_call_us;
};

void Check(tw_status status) {
  if (status == TW_OK) return;
  std::fprintf(stderr, "%s\n", tw_last_error());
  std::exit(1);
}

template <typename Submit>
double Microseconds(Submit submit) {
  const auto begin = std::chrono::steady_clock::now();
  submit();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

void SetUp(int rank, size_t parameters, Rank* r) {
  tw_options options;
  tw_options_init(&options);
  options.rank = rank;
  options.size = kWorld;
  options.local_group = "submit_bench";
  Check(tw_comm_create(&options, &r->comm));
  r->values.resize(parameters * kNumel);
  for (size_t i = 0; i < parameters; ++i) {
    r->names.push_back("layers." + std::to_string(i) + ".attention.projection.weight");
  }
  for (const std::string& name : r->names) {
    r->segments.push_back({name.c_str(), 0, kNumel, kNumel, 0, 0});
  }
}

// The two take turns on one bucket, so that they meet the same residuals and the same load.
void Run(int steps, Rank* r) {
  tw_bucket_info info{};
  info.struct_size = sizeof(info);
  info.name = "bucket";
  info.count = r->values.size();
  info.segments = r->segments.data();
  info.num_segments = r->segments.size();
  tw_bucket* bucket = nullptr;
  Check(tw_bucket_create(r->comm, &info, &bucket));
  float* const x = r->values.data();
  for (int step = 0; step < steps; ++step) {
    r->by_handle_us.push_back(
        Microseconds([&] { Check(tw_bucket_start(bucket, x, x, nullptr, nullptr, 0)); }));
    Check(tw_bucket_wait(bucket));
    tw_work* work = nullptr;
    r->by_call_us.push_back(Microseconds([&] {
      Check(tw_all_reduce_segments(x, x, info.count, TW_F32, TW_MEAN, r->comm, nullptr, "bucket", 0,
                                   r->segments.data(), r->segments.size(), &work));
    }));
    Check(tw_wait(work));
  }
  tw_bucket_destroy(bucket);
  tw_comm_destroy(r->comm);
}

void Print(const char* what, std::vector<double> us) {
  std::sort(us.begin(), us.end());
  std::printf("%-10s %10.2f us, middle half %.2f to %.2f\n", what, us[us.size() / 2],
              us[us.size() / 4], us[us.size() * 3 / 4]);
}

int Main(size_t parameters, int steps) {
  std::vector<Rank> ranks(kWorld);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      SetUp(rank, parameters, &ranks[rank]);
      Run(steps, &ranks[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%zu parameters, %d steps, int4\n", parameters, steps);
  for (int rank = 0; rank < kWorld; ++rank) {
    std::printf("rank %d\n", rank);
    Print("by handle", ranks[rank].by_handle_us);
    Print("by call", ranks[rank].by_call_us);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  size_t parameters = 100;
  int steps = 500;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--parameters") == 0)
      parameters = std::strtoul(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--steps") == 0) steps = std::atoi(argv[i + 1]);
  }
  return Main(parameters, steps);
}
