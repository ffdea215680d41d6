// PredictOrder: the order of a step's chunks, predicted from the times at which tensors were ready
// in the step before. Pure logic.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTED_ORDER_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTED_ORDER_H_

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

// The order of one link that always takes the first ready chunk by policy, and that finishes what
// it has begun. Every chunk is in it once; ties go to the earlier tensor.
std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTED_ORDER_H_
