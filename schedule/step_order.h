// StepOrder: the order of a step's chunks, foretold from when tensors were ready in the step
// before. All ranks compute it alike, so that above a millisecond of latency nobody needs to be
// told.
#ifndef THINWIRE_SCHEDULE_STEP_ORDER_H_
#define THINWIRE_SCHEDULE_STEP_ORDER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/options.h"

namespace thinwire {

// A tensor of a step, in the order of its submission.
struct ExpectedTensor {
  double ready_s = 0.0;   // on the last rank to have it, since the step began
  double length_s = 0.0;  // that its bytes take on the link
  int priority = 0;
  uint32_t chunks = 1;
};

struct ChunkOfStep {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkOfStep&, const ChunkOfStep&) = default;
};

// What one link would do that always takes the first ready chunk by policy, and that finishes what
// it has begun. Every chunk is in it once; ties go to the earlier tensor.
std::vector<ChunkOfStep> StepOrder(std::span<const ExpectedTensor> tensors, Policy policy);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STEP_ORDER_H_
