// Prediction: what rank 0 remembers of a step, and the order of the next step that follows from it.
//
// An announcement costs two latencies, from the moment a chunk is ready to its start. Where
// latencies are long, rank 0 announces a step's chunks before they are ready, in the order in which
// the step before says that they will be wanted (predicted_order.h). Pure logic. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
#define THINWIRE_SCHEDULE_ORDER_PREDICTION_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/predicted_order.h"
#include "schedule/recycled.h"

namespace thinwire {

class Prediction {
 public:
  // More tensors than this between two ends of steps are no step, and are not remembered.
  static constexpr size_t kMaxTensors = size_t{1} << 16;

  // `hop_shares`: of a chunk's bytes, by hop, as ExpectedLink has them.
  Prediction(const Options& options, std::vector<double> hop_shares);

  // Rank 0 has submitted the tensor: it belongs to the step. Times are seconds of any one clock.
  void OnSubmitted(const Report& report, double now);
  // All ranks have it. More than once changes nothing.
  void OnReady(uint64_t id, double now);
  // Rank 0 has submitted all of the step. The next one will have the same tensors.
  void EndStep(double now);

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
  struct Tensor {
    Report report;
    double ready = -1.0;
  };
  struct Step {
    double begin = 0.0;
    std::vector<Tensor> tensors;
    RecycledMap<size_t> index;  // of a tensor, by id

    Tensor* Find(uint64_t id);
    void Clear(double now);
  };

  Tensor* Find(uint64_t id);
  void ForgetBefore(double time);

  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const Policy policy_;
  const double chunk_bytes_;  // of fp32 input, as all bytes here
  const double lanes_bytes_;  // of chunks on all lanes
  ExpectedLink link_;
  Step ended_, current_;
  bool waiting_ = false;  // for ended_ to be ready everywhere
  // Bytes done until a time: of the step, and of the one before.
  struct Delivered {
    double when;
    double bytes;
  };
  std::vector<Delivered> delivered_ = {{-kNever, 0.0}};
  double rates_[3] = {};  // the highest of the step, and of the two before it
  // The last step was much faster than those before: the window was what held the link back.
  bool growing_ = false;
  double chunk_s_ = 0.0, step_chunk_s_ = kNever;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
