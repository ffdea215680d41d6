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
#include "schedule/recycled_map.h"

namespace thinwire {

class Prediction {
 public:
  // More tensors than this between two ends of steps are no step, and are not remembered.
  static constexpr size_t kMaxTensors = size_t{1} << 16;

  explicit Prediction(Policy policy) : policy_(policy) {}

  // Rank 0 has submitted the tensor: it belongs to the step. Times are seconds of any one clock.
  void OnSubmitted(const Report& report, double now);
  // All ranks have it. More than once changes nothing.
  void OnReady(uint64_t id, double now);
  void OnDone(uint64_t id, double now);
  // Rank 0 has submitted all of the step. The next one will have the same tensors.
  void EndStep(double now);

  // Once for each step, as soon as all ranks had all of it: the chunks of the next step, in order;
  // their reports have the next call. Empty otherwise.
  struct NextStep {
    std::vector<Report> tensors;
    std::vector<PredictedChunk> chunks;
  };
  NextStep Next();

  // A chunk is done on rank 0, which started it at `started`.
  void OnChunkDone(double started, double now);

  // The rate at which the link carries fp32 input; 0 before anything was done.
  double bytes_per_s() const;
  // The least time of a chunk from its start to its end, over the last steps: all its hops'
  // latencies, and its work. 0 before a step has ended.
  double chunk_s() const { return chunk_s_; }

 private:
  struct Tensor {
    Report report;
    double ready = -1.0;
    bool done = false;
  };
  struct Step {
    double begin = 0.0;
    std::vector<Tensor> tensors;
    RecycledMap<size_t> index;  // of a tensor, by id

    Tensor* Find(uint64_t id);
    void Clear(double now);
  };

  Tensor* Find(uint64_t id);
  void Spend(double now);

  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const Policy policy_;
  Step ended_, current_;
  bool waiting_ = false;  // for ended_ to be ready everywhere
  // Elements carried, and the seconds in which something was ready and not done. Older steps fade.
  double carried_ = 0.0;
  double busy_ = 0.0;
  // A chunk's elements and its time, whenever the link was idle before: while it fills, the first
  // chunk's latencies are no sign of the link's rate.
  double first_ = 0.0;
  double filling_ = 0.0;
  double chunk_s_ = 0.0, step_chunk_s_ = kNever;
  int unfinished_ = 0;
  double counted_until_ = 0.0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_PREDICTION_H_
