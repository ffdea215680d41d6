// Lanes: chunks on their lanes, and the link.
#ifndef THINWIRE_SCHEDULE_SIM_LANES_H_
#define THINWIRE_SCHEDULE_SIM_LANES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "schedule/sim/events.h"
#include "schedule/sim/processor.h"
#include "schedule/sim/server.h"
#include "schedule/sim/wire.h"

namespace thinwire::sim {

class Lanes {
 public:
  using Done = std::function<void(const ChunkId&)>;
  // `hop_done`: called when a hop of a chunk on a lane has ended. `done`: when a chunk, or a unit
  // outside the order, is done.
  Lanes(const Setting& setting, const Wire& wire, Events& events, Processor& processor,
        Done hop_done, Done done);

  // Starts a chunk, for which every rank has a lane.
  void Start(const ChunkId& id);
  // Starts a unit outside the order, which requires no lane.
  void StartDirect(const ChunkId& id);
  // Returns when rank 0 will have sent or received `frames` more control frames.
  double HandleFrames(double frames);

 private:
  using Phases = std::shared_ptr<const std::vector<Phase>>;
  void Continue(const ChunkId& id, const Phases& phases, size_t next);
  void Compute(double seconds, Events::Action then);
  void Send(const Phase& phase, Events::Action then);

  const Setting& setting_;
  const Wire& wire_;
  Events& events_;
  Processor& processor_;
  const Done hop_done_, done_;
  Server& LoopOfNextExchange();

  double link_paid_until_ = 0.0, inside_paid_until_ = 0.0;
  // The threads that handle messages; the first one also handles control frames. On a shared
  // machine there is one, for all work of the cores, including codecs.
  std::vector<Server> loops_;
  uint64_t exchanges_ = 0;
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_LANES_H_
