// PredictStep: the order of a step's chunks and how many of them are to be under way at once,
// predicted from the times at which tensors were ready in the step before. Pure logic.
//
// The prediction runs the step ahead on a model of the link: first in, first out, and every hop of
// a chunk takes its time on it and then a latency. The order is that of a link which takes a new
// chunk, the first by policy, whenever what is queued at it runs out. The window is the one, of a
// few sizes, with which a rank that starts chunks in this order ends the model's step first. A
// window of one hop's time fills a link whose hops come evenly. A step's first chunks come at once,
// though, and then their later hops at once, so some steps take more; and a window that is too
// large delays what is urgent by what was sent before it.
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
  double length_s = 0.0;  // that its bytes take on the link, all hops together
  int priority = 0;
  uint32_t chunks = 1;
};

struct ExpectedLink {
  double hop_s = 0.0;              // from a hop's last byte to the next hop's first
  std::vector<double> hop_shares;  // of a chunk's time on the link, by hop; at least one, sum 1
};

struct ChunkOfStep {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkOfStep&, const ChunkOfStep&) = default;
};

// Every chunk once; ties go to the earlier tensor. A chunk starts when at most `backlog_s` of bytes
// are queued at the link, and finishes what it has begun.
std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy,
                                      const ExpectedLink& link, double backlog_s);

// When the step ends with chunks that start as PredictedQueue lets them, with hops of `window_s`
// seconds of the link under way at once. Under p3 that is the end of the forward pass after it,
// which needs the tensors in the order of their priority; its layers take half of the time by which
// their tensors follow one another in the backward pass.
double PredictEnd(std::span<const ExpectedTensor> tensors, std::span<const ChunkOfStep> order,
                  Policy policy, const ExpectedLink& link, double window_s);

struct PredictedStep {
  std::vector<ChunkOfStep> order;
  double window_s = 0.0;  // as for PredictEnd
};

// `chunk_s`: the least time of a chunk from its start to its end. `link_s`: the time in which a
// chunk of full size passes the link, which the window has beside a multiple of a hop's time.
PredictedStep PredictStep(std::span<const ExpectedTensor> tensors, Policy policy,
                          const ExpectedLink& link, double chunk_s, double link_s);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTED_ORDER_H_
