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

  // Takes a lane, if one is free, for a chunk that will start on it.
  bool Take();
  // On a lane that was taken; gives it back before `done` is called.
  void Start(const ChunkId& id);
  // A raw unit needs none.
  void StartRaw(const ChunkId& id);

 private:
  void Compute(double seconds_per_element, const ChunkId& id, Events::Action then);
  void Send(double bytes, Events::Action then);

  const Setting& setting_;
  const Wire& wire_;
  Events& events_;
  Processor& processor_;
  const Done done_;
  int free_;
  double link_paid_until_ = 0.0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_LANES_H_
