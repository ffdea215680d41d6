// A discrete-event simulation of training with a store: workers that compute, servers, and the
// links between them. It uses the store's own classes: StoreLayout cuts and places the keys, each
// slice has its server's Ledger, and each direction of a connection is a CreditQueue with its
// SendWindow. Pure: no threads, no real clock, no transport, and no message contents.
//
// A machine sends its messages one after another at its rate, in the order in which its connections
// release them, and receives messages in the same way; a message is sent and received at the same
// time, shifted by the latency. An acknowledgement waits behind its machine's messages, and has no
// bytes. Codecs, updates and framing take no time. An answer has the bytes of one encoding of its
// slice; in reality a worker that is behind would get more in async and ssp.
#ifndef THINWIRE_SCHEDULE_SIM_STORE_H_
#define THINWIRE_SCHEDULE_SIM_STORE_H_

#include <cstddef>
#include <cstdint>

#include "compress/codec_spec.h"
#include "schedule/sim/profile.h"
#include "schedule/store/ledger.h"
#include "transport/messages/message_plane.h"

namespace thinwire::sim {

// How a step's keys, one per unit of the profile, are exchanged as the backward pass computes them.
enum class StoreOrder {
  kFifo,   // slices, in the order of the backward pass; a push and its pull are one message
  kP3,     // the same, but slices of earlier units overtake
  kMxnet,  // whole keys, in that order; a pull is a message of its own after its push
};

struct StoreSetting {
  Profile profile;
  int workers = 2;
  int servers = 1;
  StoreMode mode;
  CodecPair codec;
  StoreOrder order = StoreOrder::kP3;
  size_t slice_elements = 0;  // as in StoreLayout::Options

  double bytes_per_s = 0;         // of each worker's link, in each direction
  double server_bytes_per_s = 0;  // of each server's link, in each direction; 0: as a worker's
  double latency_s = 0;           // one way
  size_t credit = MessageLimits().credit;

  double slow = 1;          // the last worker computes this many times as long
  double spike_chance = 0;  // probability that a worker computes a step `spike` times as long
  double spike = 1;
  uint64_t seed = 1;
  int steps = 6;   // per worker on average, including the warm-up
  int warmup = 2;  // steps that are not counted; windows require some to learn the links
};

struct StoreOutcome {
  bool finished = false;  // false: workers wait for one another for ever, or a rule was broken
  // Average seconds in which each worker makes one step; in sync, of a step of all workers.
  double step_s = 0;
  // The average over the same steps of a lower bound for any order of bytes (Jackson's bound of
  // each link's bytes, given the computing). 0 except in sync: other modes have no common steps.
  double bound_s = 0;
};

// The setting must have a layer, a worker, a server, a rate, and fewer warm-up steps than steps.
StoreOutcome SimulateStore(const StoreSetting& setting);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_STORE_H_
