// A discrete-event simulation of data-parallel training: ranks that compute, each with the engine's
// sequencer, lanes that carry chunks, and a link that they share. Pure: no threads, no real clock,
// no transport.
#ifndef THINWIRE_SCHEDULE_SIM_SIMULATOR_H_
#define THINWIRE_SCHEDULE_SIM_SIMULATOR_H_

#include <cstdint>
#include <vector>

#include "schedule/options.h"
#include "schedule/sim/profile.h"

namespace thinwire::sim {

// How the order of chunks is decided.
enum class Order {
  kAnnounced,  // rank 0 announces chunk by chunk
  kPredicted,  // rank 0 predicts each step from the one before; the first one is announced
};

// Seconds that a rank's codecs take per element of a chunk.
struct CodecCost {
  double encode_s = 0;
  double reduce_s = 0;
  double decode_s = 0;
};

struct Setting {
  Profile profile;
  int ranks = 2;
  Options engine;        // codec (for the bytes), policy, lanes, chunk_bytes, min_bytes
  bool barrier = false;  // the next forward pass waits for all units
  Order order = Order::kAnnounced;

  double bytes_per_s = 0;  // of each rank's link, in each direction
  // The same for separate links inside nodes of engine.local_size ranks; 0: no such nodes.
  double inside_bytes_per_s = 0;
  double latency_s = 0;    // one way
  int hop_latencies = 1;   // per exchange; 2 if the receiver must first say that it is ready
  double burst_bytes = 0;  // that an idle link sends at once (token bucket)
  double overhead_s = 0;   // processor time per exchange, in addition to its bytes

  // Time of a thread that sends and receives a rank's messages (there are engine.loops of them) for
  // one message sent and one received; half of it for a control frame.
  double message_s = 0;
  double message_s_per_byte = 0;
  // Cores of the machine that all ranks share, for codecs and messages; 0: each rank has its own
  // machine, with as many cores as it can use.
  int cores = 0;

  CodecCost codec;
  double cpu_s_per_byte = 0;  // processor time per byte that a rank sends
  // How much codecs and sending slow down computing, and computing them: 0 if they have their own
  // cores (or GPU engines), 1 if a rank has one core, more if they also evict its caches.
  double contention = 0;

  double jitter = 0;      // every layer's time is multiplied by 1 to 1 + 2 * jitter, uniformly
  double straggling = 0;  // rank 1 takes 1 + straggling times as long
  uint64_t seed = 1;
  int steps = 6;   // including the warm-up
  int warmup = 2;  // steps that are not counted; predictions learn the link's rate in them
};

// The number of lanes of announced chunks that keeps a link busy: a few, plus as many as there are
// chunks on their way in the hops' latency.
int LanesFor(const Setting& setting);

struct Outcome {
  std::vector<double> step_s;
  std::vector<double> bound_s;  // by step: no order of chunks could be faster
  bool finished = false;        // false: a failure, or ranks wait for one another for ever
  double control_frames = 0;    // sent and received by rank 0, per step on average
  double ratio() const;         // sum of steps over sum of bounds
  double mean_s() const;
};

Outcome Simulate(const Setting& setting);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_SIMULATOR_H_
