// Sequence: which chunk starts next. All ranks start chunks in one order, which either rank 0
// announces or all of them know beforehand.
#ifndef THINWIRE_SCHEDULE_SIM_SEQUENCE_H_
#define THINWIRE_SCHEDULE_SIM_SEQUENCE_H_

#include <memory>
#include <span>

#include "schedule/sim/events.h"
#include "schedule/sim/lanes.h"
#include "schedule/sim/wire.h"

namespace thinwire::sim {

class Sequence {
 public:
  virtual ~Sequence() = default;

  // The first rank begins a step. Of the last step, for each unit: when all ranks had it, since
  // that step's begin; empty before the first.
  virtual void BeginStep(int step, std::span<const double> ready_s) = 0;
  // A rank has the unit's gradient.
  virtual void OnReady(int rank, uint32_t unit, int step) = 0;
  virtual void OnDone(const ChunkId& id) = 0;
};

std::unique_ptr<Sequence> MakeSequence(const Setting& setting, const Wire& wire, Events& events,
                                       Lanes& lanes);

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_SEQUENCE_H_
