// Policy's rule: which of two tensors that are ready goes first. Whoever orders work by policy
// uses it: the leader all ranks' chunks, and a sender what goes to one peer.
#ifndef THINWIRE_SCHEDULE_ORDER_POLICY_H_
#define THINWIRE_SCHEDULE_ORDER_POLICY_H_

#include <cstdint>

#include "schedule/options.h"

namespace thinwire {

// A tensor's place in the order. The two counts are of one clock, so no two tensors share one.
struct Place {
  uint64_t submitted = 0;  // when the first rank had it
  uint64_t complete = 0;   // when all ranks had it
  int32_t priority = 0;    // lower goes first
};

// A strict order for each policy: see Policy.
constexpr bool GoesBefore(Policy policy, const Place& a, const Place& b) {
  if (policy == Policy::kFifo) return a.submitted < b.submitted;
  if (policy == Policy::kP3 && a.priority != b.priority) return a.priority < b.priority;
  return a.complete < b.complete;
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_POLICY_H_
