// Lanes: the life of a chunk on a lane, and the link.
#ifndef THINWIRE_SCHEDULE_SIM_LANES_H_
#define THINWIRE_SCHEDULE_SIM_LANES_H_

#include <functional>

#include "schedule/sim/events.h"
#include "schedule/sim/processor.h"
#include "schedule/sim/wire.h"

namespace thinwire::sim {

class Lanes {
 public:
  using Done = std::function<void(const ChunkId&)>;
  Lanes(const Setting& setting, const Wire& wire, Events& events, Processor& processor, Done done);

  // A chunk, which every rank has a lane for.
  void Start(const ChunkId& id);
  // A unit outside the order, which needs no lane.
  void StartDirect(const ChunkId& id);

 private:
  void Compute(double seconds_per_element, const ChunkId& id, Events::Action then);
  void Send(double bytes, Events::Action then);

  const Setting& setting_;
  const Wire& wire_;
  Events& events_;
  Processor& processor_;
  const Done done_;
  double link_paid_until_ = 0.0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_LANES_H_
