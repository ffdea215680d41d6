// Engine: collectives of one process group. There are no globals; a process may have any number.
#ifndef THINWIRE_SCHEDULE_ENGINE_H_
#define THINWIRE_SCHEDULE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "compress/error_feedback.h"
#include "schedule/collective/settle.h"
#include "schedule/request.h"
#include "schedule/stats.h"
#include "schedule/work.h"
#include "transport/transport.h"

namespace thinwire {

class Bucket;

class Engine {
 public:
  // Takes over a connected transport (an empty one in a world of one). Starts
  // options->lanes + 3 threads (4 where exchanges complete by events), one more with a device, one
  // or two less where they match by order, and none in a world of one; predicted chunks may add
  // options->predicted_lanes. With a device all
  // tensors must be its own; submitting never waits for it. Unimplemented for a codec that the
  // device has no kernels for.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const Settled& options, Transport transport,
                                                        std::shared_ptr<Device> device = nullptr);
  virtual ~Engine() = default;  // fails what is unfinished with Cancelled, joins its threads

  // Describes a bucket once; the handle stays valid as long as the engine. A name may be described
  // anew: residuals move to the newest description that is submitted. Thread-safe.
  // InvalidArgument for a bad description.
  virtual absl::StatusOr<std::shared_ptr<const Bucket>> Register(const BucketRequest& request) = 0;

  // Puts the bucket in flight, and returns at once. Of a named bucket, one use at a time is in
  // flight. A later use of a handle allocates nothing and copies no name. Memory of the submission
  // must live until the work is done. Thread-safe. InvalidArgument for bad input; a failed engine
  // returns its first failure.
  virtual absl::StatusOr<std::shared_ptr<Work>> Submit(const std::shared_ptr<const Bucket>& bucket,
                                                       const Submission& submission) = 0;

  // Register and Submit in one. An empty tensor is done at once.
  absl::StatusOr<std::shared_ptr<Work>> Start(const CollectiveRequest& request);

  // Fails the group on every rank with `reason`; from any thread. Returns when every rank has heard
  // it, or can't any more, which takes half a second at most: the process may end then.
  virtual void Abort(absl::Status reason) = 0;
  virtual absl::Status status() const = 0;  // the first failure, or OK

  virtual Stats stats() const = 0;

  // Says which ranks wait for which, and the last events, for people. Any time, any thread.
  virtual std::string Describe() const = 0;

  // The residuals. Only while nothing is in flight.
  virtual ErrorFeedback& error_feedback() = 0;

  // The codecs of Options in this world: topk is int4 where that costs fewer bytes.
  virtual const std::vector<CodecPair>& codecs() const = 0;

  // True if an allreduce of a tensor of that size and dtype goes uncompressed.
  virtual bool GoesRaw(const TensorView& input) const = 0;

  // The step that the next use of every name is: topk's warm-up and stochastic rounding go by it.
  // Zero at first; set when a run is resumed.
  virtual void SetStep(uint64_t step) = 0;

  // All of a training step has been submitted, and the next step will submit the same tensors.
  // Where ranks are far apart their order is then predicted. Rank 0's call counts.
  virtual void EndStep() = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_H_
