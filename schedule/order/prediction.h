// Prediction: what rank 0 remembers of a step, and the order of the next step that follows from it.
//
// An announcement costs two latencies, from the moment a chunk is ready to its start. Where
// latencies are long, rank 0 announces a step's chunks before they are ready, in the order in which
// the step before says that they will be wanted: PredictStep says the order of a step's chunks, and
// how many of them are to be under way at once. Pure logic. Not thread-safe.
//
// PredictStep runs the step ahead on a model of the link: first in, first out, and every hop of
// a chunk takes its time on it and then a latency. The order is that of a link which takes a new
// chunk, the first by policy, whenever what is queued at it runs out. The window is the one, of a
// few sizes, with which a rank that starts chunks in this order ends the model's step first. A
// window of one hop's time fills a link whose hops come evenly. A step's first chunks come at once,
// though, and then their later hops at once, so some steps take more; and a window that is too
// large delays what is urgent by what was sent before it.
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
  double ready_s = 0.0;   // on the last rank to have it, since the step began
  double length_s = 0.0;  // that its bytes take on the link, all hops together
  int priority = 0;
  uint32_t chunks = 1;
  // On rank 0, since the step began, if a caller may wait for it before it submits what is ready
  // later.
  double done_s = std::numeric_limits<double>::infinity();
};

struct ExpectedLink {
  double hop_s = 0.0;              // from a hop's last byte to the next hop's first
  std::vector<double> hop_shares;  // of a chunk's time on the link, by hop; at least one, sum 1
  // A step's chunks take so many times length_s, which is by the highest rate of a short time.
  double slowdown = 1.0;
};

struct ChunkOfStep {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkOfStep&, const ChunkOfStep&) = default;
};

// Every chunk once; ties go to the earlier tensor. The link is `slowdown` times slower: an order
// for a link that is faster than the true one has urgent chunks too late, behind those that the
// true one has not sent yet. A chunk starts when at most `backlog_s` of bytes are queued at the
// link, and finishes what it has begun. All chunks of a tensor come before those of one that was
// ready only when it was done, whatever the model says: a program that waits for the one before it
// submits the other never submits a chunk ahead of what it waits for.
std::vector<ChunkOfStep> PredictOrder(std::span<const ExpectedTensor> tensors, Policy policy,
                                      const ExpectedLink& link, double backlog_s);

// When the step ends with chunks that start as StartQueue lets them, with hops of `window_s`
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

// Rank 0's memory of a step.
class Prediction {
 public:
  // More tensors than this between two ends of steps are no step, and are not remembered.
  static constexpr size_t kMaxTensors = size_t{1} << 16;

  // `hop_shares`: of a chunk's bytes, by hop, as ExpectedLink has them.
  Prediction(const Options& options, std::vector<double> hop_shares);

  // Rank 0 has submitted the tensor: it belongs to the step if it has a name. Times are seconds of
  // any one clock.
  void OnSubmitted(const Report& report, double now);
  // All ranks have it. More than once changes nothing.
  void OnReady(uint64_t id, double now);
  // It is done on rank 0. The last rank's report may be slower than its bytes, so all have it.
  void OnDone(uint64_t id, double now);
  // Callers may wait for a tensor before they submit another: what was done before another was
  // ready stays ahead of it from now on.
  void ExpectWaits() { waits_ = true; }
  // Rank 0 has submitted all of the step. The next one will have the same tensors.
  void EndStep(double now);
  // Rank 0 has submitted all of the step, and the next one may be another: nothing follows from it,
  // nor from the step before, whose next step is over. Else its tensors would count with those of
  // the next step that ends.
  void ForgetStep(double now) {
    Begin(now);
    waiting_ = false;
  }

  // Once for each step, as soon as all ranks had all of it: the chunks of the next step, in order;
  // their reports have the next call. Empty otherwise.
  struct NextStep {
    std::vector<Report> tensors;
    std::vector<PredictedChunk> chunks;
  };
  NextStep Next();

  // A chunk of so many bytes of fp32 input is done on rank 0, which started it at `started`.
  void OnChunkDone(double started, double now, size_t bytes);

  // The rate at which the link carries fp32 input; 0 before anything was done. It is the highest of
  // the last steps: of the bytes that were done in twice the time of a chunk which ended then. A
  // link that has too little to do is slower than it could be, so lower rates say nothing of it;
  // and in the time of one chunk hops may come in bursts. Cardwell et al., "BBR:
  // Congestion-Based Congestion Control", ACM Queue 14 (2016), has rate and latency in this way.
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
  bool waiting_ = false;  // for ended_ to be ready everywhere
  bool waits_ = false;    // callers may
  // Bytes done until a time: of the step, and of the one before.
  struct Delivered {
    double when;
    double bytes;
  };
  std::vector<Delivered> delivered_ = {{-kNever, 0.0}};
  std::array<double, 3> rates_ = {};  // the highest of the step, and of the two before it
  // The same of rates at which at least half of a step's bytes were done: what a link's buffers let
  // pass at once, and hops that come in bursts, hardly count.
  std::array<double, 3> steady_rates_ = {};
  double step_bytes_ = 0.0, bytes_before_ = 0.0;  // of the last step, and all until its end
  // The last step was much faster than those before: the window was what held the link back.
  bool growing_ = false;
  double chunk_s_ = 0.0, step_chunk_s_ = kNever;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
