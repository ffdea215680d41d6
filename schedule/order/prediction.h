// Prediction: rank 0's record of a step, from which it predicts the order of the next step.
//
// An announcement costs two latencies between the time when a chunk is ready and its start. If
// latencies are long, rank 0 orders a step's chunks before they are ready, based on the step
// before: PredictStep gives the order of a step's chunks, and how many of them may be under way at
// once. Pure logic. Not thread-safe.
//
// PredictStep simulates the step on a model of the link: a FIFO queue, in which every hop of a
// chunk takes its transmission time and then a latency. The order is the one in which this link
// takes chunks: the first by policy, whenever its queue runs out. Among a few window sizes
// PredictStep chooses the one with which a rank that starts chunks in this order ends the simulated
// step first. A window of one hop's time fills a link whose hops come evenly. But a step's first
// chunks come all at once, and so do their later hops, so some steps require more; and a window
// that is too large delays urgent chunks behind bytes already sent.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTION_H_

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "schedule/containers.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"

namespace thinwire {

// A tensor of a step, in the order of its submission.
struct ExpectedTensor {
  double ready_s = 0.0;   // seconds from the step's start until all ranks have it
  double length_s = 0.0;  // seconds that its bytes take on the link, over all hops
  int priority = 0;
  uint32_t chunks = 1;
  // Seconds from the step's start until it is done on rank 0, if callers may wait for it before
  // they submit tensors that are ready later.
  double done_s = std::numeric_limits<double>::infinity();
};

struct ExpectedLink {
  double hop_s = 0.0;              // from a hop's last byte to the next hop's first
  std::vector<double> hop_shares;  // of a chunk's time on the link, by hop; at least one, sum 1
  // A step's chunks take this many times length_s, which assumes the highest short-term rate.
  double slowdown = 1.0;
};

struct ChunkOfStep {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkOfStep&, const ChunkOfStep&) = default;
};

// Returns every chunk once; ties go to the earlier tensor. Assumes a link that is `slowdown` times
// slower: with a link faster than the real one, urgent chunks would come too late in the order,
// behind chunks that the real one has not sent yet. A chunk starts when at most `backlog_s` seconds
// of bytes are queued at the link, and is not preempted. All chunks of a tensor come before those
// of a tensor that was ready only after the first was done, whatever the model says: a program that
// waits for the one before it submits the other never submits a chunk ahead of what it waits for.
std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy,
                                      const ExpectedLink& link, double backlog_s);

// Returns when the step ends if chunks start as StartQueue allows, with hops of at most `window_s`
// seconds of the link under way at once. Under p3 this is the end of the next forward pass, which
// requires the tensors in the order of their priority; each layer is assumed to take half of the
// time between its tensor and the one before it in the backward pass.
double PredictEnd(std::span<const ExpectedTensor> tensors, std::span<const ChunkOfStep> order,
                  Policy policy, const ExpectedLink& link, double window_s);

struct PredictedStep {
  std::vector<ChunkOfStep> order;
  double window_s = 0.0;  // as for PredictEnd
};

// `chunk_s`: the least time of a chunk from its start to its end. `link_s`: the time that a chunk
// of full size takes on the link. The window is link_s plus a multiple of a hop's time.
PredictedStep PredictStep(std::span<const ExpectedTensor> tensors, Policy policy,
                          const ExpectedLink& link, double chunk_s, double link_s);

// Rank 0's record of the last steps.
class Prediction {
 public:
  // If more tensors than this come without an end of a step, they are forgotten.
  static constexpr size_t kMaxTensors = size_t{1} << 16;

  // `hop_shares`: each hop's share of a chunk's bytes; 0 for hops inside nodes, which are left out.
  Prediction(const Options& options, std::vector<double> hop_shares);

  // Rank 0 has submitted the tensor: it belongs to the step if it has a name. Times are seconds of
  // any one clock.
  void OnSubmitted(const Report& report, double now);
  // All ranks have the tensor. Further calls have no effect.
  void OnReady(uint64_t id, double now);
  // The tensor is done on rank 0, so all ranks have it, even if a report is still on its way.
  void OnDone(uint64_t id, double now);
  // Callers may wait for a tensor before they submit another: from now on a tensor that was done
  // before another was ready stays ahead of it.
  void ExpectWaits() { waits_ = true; }
  // Rank 0 has submitted all of the step. The next one will have the same tensors.
  void EndStep(double now);
  // Rank 0 has submitted all of the step, and the next one may have other tensors: nothing is
  // predicted from this step, nor from the one before it, whose next step is over. Without this
  // call the step's tensors would count as part of the next step that ends.
  void ForgetStep(double now) {
    Begin(now);
    waiting_ = false;
  }

  // Returns the chunks of the next step, in order, once for each ended step, as soon as all ranks
  // have all tensors of that step; empty otherwise. The reports have the number of the next call.
  struct NextStep {
    std::vector<Report> tensors;
    std::vector<PredictedChunk> chunks;
  };
  NextStep Next();

  // A chunk of `bytes` bytes of fp32 input, started at `started`, is done on rank 0.
  void OnChunkDone(double started, double now, size_t bytes);

  // The rate at which the link carries fp32 input; 0 before any chunk is done. It is the highest
  // rate of the last steps, since a link with little to do is slower than it could be. A rate is
  // measured when a chunk ends, over twice that chunk's time, since within one chunk's time hops
  // may come in bursts. Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14
  // (2016), estimates rate and latency in this way.
  double bytes_per_s() const;
  // The least time of a chunk from its start to its end, over the last steps: all its hops'
  // latencies, and its work. 0 before a step has ended.
  double chunk_s() const { return chunk_s_; }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  struct Tensor {
    Report report;
    double ready = -1.0;
    double done = kNever;
  };
  struct Step {
    double begin = 0.0;
    std::vector<Tensor> tensors;
    RecycledMap<size_t> index;  // of a tensor, by id
  };

  Tensor* Find(uint64_t id);
  void Begin(double now);
  void ForgetBefore(double time);

  const Policy policy_;
  const double chunk_bytes_;  // of fp32 input, as all bytes here
  const double lanes_bytes_;  // of chunks on all lanes
  ExpectedLink link_;
  Step ended_, current_;
  bool waiting_ = false;  // until all ranks have all tensors of ended_
  bool waits_ = false;    // callers may wait between tensors
  // Bytes done until a time: entries of this step and the one before.
  struct Delivered {
    double when;
    double bytes;
  };
  std::vector<Delivered> delivered_ = {{-kNever, 0.0}};
  std::array<double, 3> rates_ = {};  // the highest of this step, and of each of the two before
  // The same for rates over at least half of a step's bytes, which bursts of hops and bursts into a
  // link's buffers hardly raise.
  std::array<double, 3> steady_rates_ = {};
  double step_bytes_ = 0.0, bytes_before_ = 0.0;  // of the last step; of all steps until its end
  // The last step was much faster than those before: the window had limited the link.
  bool growing_ = false;
  double chunk_s_ = 0.0, step_chunk_s_ = kNever;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
