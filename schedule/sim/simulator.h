// A discrete-event simulation of data-parallel training: ranks that compute, each with the
// sequencer that the engine runs, lanes that carry chunks, and a link that they share. Pure: no
// threads, no clock, no transport.
#ifndef THINWIRE_SCHEDULE_SIM_SIMULATOR_H_
#define THINWIRE_SCHEDULE_SIM_SIMULATOR_H_

#include <cstdint>
#include <vector>

#include "schedule/options.h"
#include "schedule/sim/profile.h"

namespace thinwire::sim {

// How the order of chunks comes about.
enum class Order {
  kAnnounced,  // rank 0 announces chunk by chunk
  kPredicted,  // rank 0 predicts each step from the one before; the first one is announced
};

// Seconds that a rank's codecs take for an element of a chunk.
struct CodecCost {
  double encode_s = 0;
  double reduce_s = 0;
  double decode_s = 0;
};

struct Setting {
  Profile profile;
  int ranks = 2;
  Options engine;        // codec (for the bytes), policy, lanes, chunk_bytes, min_bytes
  bool barrier = false;  // the next forward pass waits for everything
  Order order = Order::kAnnounced;

  double bytes_per_s = 0;  // of each rank's link, each way
  // The same inside nodes of engine.local_size ranks, which have links of their own; 0: there are
  // no such nodes.
  double inside_bytes_per_s = 0;
  double latency_s = 0;    // one way
  int hop_latencies = 1;   // of each exchange; 2 where the receiver must say first that it is ready
  double burst_bytes = 0;  // that an idle link lets pass at once: a token bucket's
  double overhead_s = 0;   // of each exchange, beside its bytes; the processor's

  // Time of the thread that sends and receives a rank's messages (there are engine.loops of them)
  // for a message sent and one received; half of it for a control frame.
  double message_s = 0;
  double message_s_per_byte = 0;
  // Cores of the machine that all ranks share, for codecs and messages; 0: a rank has as many as it
  // can use, on a machine of its own.
  int cores = 0;

  CodecCost codec;
  double cpu_s_per_byte = 0;  // of the processor, for what a rank sends
  // How much codecs and sending take from computing, and computing from them: 0 where they have
  // cores (or a GPU's engines) of their own, 1 where a rank has one core, more where they also
  // spoil its caches.
  double contention = 0;

  double jitter = 0;      // every layer takes 1 to 1 + 2 * jitter times its time, uniformly
  double straggling = 0;  // rank 1 takes 1 + straggling times as long
  uint64_t seed = 1;
  int steps = 6;   // those of the warm-up included
  int warmup = 2;  // steps that are not counted; a prediction takes some to learn the link's rate
};

// The lanes of announced chunks that keep a link busy: a few, and as many more as chunks are on
// their way in the hops' latency.
int LanesFor(const Setting& setting);

struct Outcome {
  std::vector<double> step_s;
  std::vector<double> bound_s;  // of the same steps: no order of chunks could be faster
  bool finished = false;        // false: ranks wait for one another for ever
  double control_frames = 0;    // that rank 0 sent and got, in the mean over all steps
  double ratio() const;         // sum of steps over sum of bounds
  double mean_s() const;
};

Outcome Simulate(const Setting& setting);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_SIMULATOR_H_
