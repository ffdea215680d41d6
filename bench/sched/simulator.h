// A discrete-event simulation of data-parallel training: ranks that compute, a leader (the real
// one) that orders chunks (of the real plan), lanes that carry them, and a link that they share.
#ifndef THINWIRE_BENCH_SCHED_SIMULATOR_H_
#define THINWIRE_BENCH_SCHED_SIMULATOR_H_

#include <cstdint>
#include <vector>

#include "bench/sched/profiles.h"
#include "schedule/options.h"

namespace thinwire::sched {

// Who says which chunk is next.
enum class Order {
  kLeader,  // rank 0, of what all ranks have reported: schedule/leader.h
  kPlan,    // all ranks alike, from the ready times of the step before
};

struct Setting {
  Profile profile;
  int ranks = 2;
  Options engine;        // codec (for the bits), policy, lanes, chunk_bytes
  bool barrier = false;  // the next forward pass waits for everything
  Order order = Order::kLeader;
  double bytes_per_s = 0;          // of each rank's link, each way
  double latency_s = 0;            // one way
  double overhead_s = 0;           // of each exchange, beside its bytes
  double codec_s_per_element = 0;  // of all a rank encodes, reduces and decodes of a chunk
  double jitter = 0;      // every layer takes 1 to 1 + 2 * jitter times its time, uniformly
  double straggling = 0;  // rank 1 takes 1 + straggling times as long
  uint64_t seed = 1;
  int steps = 6;  // the first two are not counted
};

struct Outcome {
  std::vector<double> step_s;
  std::vector<double> bound_s;  // of the same steps: no order of chunks could be faster
  bool finished = false;        // false: ranks wait for one another for ever
  double ratio() const;         // sum of steps over sum of bounds
  double mean_s() const;
};

Outcome Simulate(const Setting& setting);

}  // namespace thinwire::sched

#endif  // THINWIRE_BENCH_SCHED_SIMULATOR_H_
