// A discrete-event simulation of training with a store: workers that compute, servers, and the
// links between them. It hosts the rules that run: StoreLayout cuts and places the keys, each slice
// has the Ledger of its server, and each direction of a connection is a CreditQueue with its
// SendWindow. Pure: no threads, no clock, no transport, and no bytes of messages.
//
// A machine sends its messages one after another at its rate, in the order in which its connections
// let them go, and takes what comes to it in the same way; a message passes both at once, and the
// latency between them. An acknowledgement waits behind what its machine has to send, and has no
// bytes. Codecs, updates and framing take no time. An answer has the bytes of one encoding of its
// slice; in async and ssp a worker that is behind would get more.
#ifndef THINWIRE_SCHEDULE_SIM_STORE_H_
#define THINWIRE_SCHEDULE_SIM_STORE_H_

#include <cstddef>
#include <cstdint>

#include "compress/codec_spec.h"
#include "schedule/sim/profile.h"
#include "schedule/store/ledger.h"
#include "transport/messages/message_plane.h"

namespace thinwire::sim {

// How a step's keys, one a unit of the profile, are exchanged when the backward pass has them.
enum class StoreOrder {
  kFifo,   // slices, in that order; a push and its pull are one message
  kP3,     // the same, but slices of earlier units overtake
  kMxnet,  // whole keys, in that order; a pull is a message behind its push
};

struct StoreSetting {
  Profile profile;
  int workers = 2;
  int servers = 1;
  StoreMode mode;
  CodecPair codec;
  StoreOrder order = StoreOrder::kP3;
  size_t slice_elements = 0;  // as StoreLayout::Options has it

  double bytes_per_s = 0;         // of each worker's link, each way
  double server_bytes_per_s = 0;  // of each server's link, each way; 0: as a worker's
  double latency_s = 0;           // one way
  size_t credit = MessageLimits().credit;

  double slow = 1;          // the last worker's computing takes so many times as long
  double spike_chance = 0;  // that a worker computes a step that takes `spike` times as long
  double spike = 1;
  uint64_t seed = 1;
  int steps = 6;   // of a worker in the mean, those of the warm-up included
  int warmup = 2;  // that are not counted; windows take some to learn the links
};

struct StoreOutcome {
  bool finished = false;  // false: workers wait for one another for ever, or a rule was broken
  // Seconds in which the workers make a step each, in the mean: in sync, of a step; in the other
  // modes, of as many updates as there are workers.
  double step_s = 0;
  // The mean over the same steps of the least that any order of bytes could take (Jackson's bound
  // of each link's bytes, after what was computed). 0 in async and ssp, which have no common steps.
  double bound_s = 0;
};

// The setting has a layer, a worker, a server, a rate, and fewer warm-up steps than steps.
StoreOutcome SimulateStore(const StoreSetting& setting);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_STORE_H_
