// Engine: compressed allreduces for one process group. One per group, no globals.
#ifndef THINWIRE_SCHEDULE_ENGINE_H_
#define THINWIRE_SCHEDULE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "compress/error_feedback.h"
#include "schedule/options.h"
#include "schedule/stats.h"
#include "schedule/work.h"
#include "transport/transport.h"

namespace thinwire {

enum class Op : uint8_t { kMean = 0, kSum = 1 };

struct AllReduceRequest {
  TensorView input;
  TensorView output;  // same numel and dtype; may be the input
  // Equal on all ranks. Empty: calls are matched by their order, and there is no error feedback.
  std::string_view key = {};
  // Which parameters the elements belong to, and with which codec they go; empty: the key itself
  // is the only parameter, and goes with the first codec.
  std::span<const Segment> segments = {};
  // Numbers of segments that this rank has no gradient for; their elements must be zeros, and count
  // as that. What was kept of them here waits: sent now, it would be lost where nobody uses the
  // mean.
  std::span<const uint32_t> absent = {};
  int priority = 0;  // lower goes first, where the policy looks at it
  Op op = Op::kMean;
  // The caller is about to wait for this very call: a small tensor is then exchanged on its thread.
  bool caller_waits = false;
  // Of an engine on a device: the stream (a cudaStream_t; null: the default one) whose work so far
  // makes the input, and whose later work may use the output once Work::Wait has returned.
  void* stream = nullptr;
};

class Engine {
 public:
  // Takes over a connected transport (null in a world of one). Starts options.lanes + 3 threads,
  // none in a world of one. With a device all tensors must be its own; AllReduce never waits for
  // it. Unimplemented for a codec or a world that the device has no kernels for.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const Options& options,
                                                        std::unique_ptr<Transport> transport,
                                                        std::shared_ptr<Device> device = nullptr);
  virtual ~Engine() = default;  // fails what is unfinished with Cancelled, joins its threads

  // Returns at once; memory of the request must live until the work is done. Thread-safe.
  // InvalidArgument for bad input; a failed engine returns its first failure.
  virtual absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) = 0;

  // Fails the group on every rank with `reason`; from any thread.
  virtual void Abort(absl::Status reason) = 0;
  virtual absl::Status status() const = 0;  // the first failure, or OK

  virtual Stats stats() const = 0;

  // The residuals. Only while no allreduce is in flight.
  virtual ErrorFeedback& error_feedback() = 0;

  // What the codecs of Options became: topk is int4 where that costs fewer bytes.
  virtual const std::vector<CodecPair>& codecs() const = 0;

  // Whether a tensor of that size and dtype goes uncompressed.
  virtual bool GoesRaw(const TensorView& input) const = 0;

  // What step the next allreduce of every name is: topk's warm-up and stochastic rounding go by it.
  // Zero at first; set when a run is resumed.
  virtual void SetStep(uint64_t step) = 0;

  // All of a training step has been submitted, and the next step will submit the same tensors.
  // Where ranks are far apart their order is then foretold. Rank 0's call counts.
  virtual void EndStep() = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_H_
