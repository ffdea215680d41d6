// Engine: the collectives of one process group. No globals; a process may have any number of them.
//
// Its parts have one duty and at most one lock each; the engine's own lock guards the sequencer:
//
//   Tensors          registered buckets, their residuals, and their uses in flight
//   Sequencer        reports in, order out: pure logic, of which the engine is the host
//   Executor         runs the chunks that the sequencer starts, and small tensors at once
//   FailureProtocol  the first reason, and how it reaches every rank
//   Farewell         the goodbyes
//   Records          statistics, events, trace
//
// Submit takes a bucket in, on the caller's thread; Retire ends its use, on the thread that
// finished it. One thread of the engine reads control frames; another is the watchdog.
#ifndef THINWIRE_SCHEDULE_ENGINE_ENGINE_H_
#define THINWIRE_SCHEDULE_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "compress/device.h"
#include "compress/error_feedback.h"
#include "schedule/collective/settle.h"
#include "schedule/engine/ending.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/records.h"
#include "schedule/engine/tensors.h"
#include "schedule/engine/workspaces.h"
#include "schedule/order/sequencer.h"
#include "schedule/request.h"
#include "transport/planes.h"

namespace thinwire {

class Engine {
 public:
  // Takes over a connected transport (an empty one in a world of one). Starts options->lanes + 2
  // threads (3 if exchanges complete by events), and none in a world of one. Small tensors that go
  // at once add one thread if their callers do not wait, and on a device a second one; predicted
  // chunks may add options->predicted_lanes. With a device all tensors must be in its memory;
  // submitting never waits for the device. Unimplemented for a codec that the device has no kernels
  // for. If this fails, the rank tells all others why, and their engines fail for the same reason.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const Settled& options, Transport transport,
                                                        std::shared_ptr<Device> device = nullptr);
  ~Engine();  // fails what is unfinished with Cancelled, joins its threads

  // Describes a bucket once; the handle stays valid as long as the engine. A name may be registered
  // again with another description: residuals move to the newest description that is submitted.
  // Thread-safe. InvalidArgument for a bad description.
  absl::StatusOr<std::shared_ptr<const Bucket>> Register(const BucketRequest& request);

  // Puts the bucket in flight, and returns at once. A named bucket has at most one use in flight. A
  // later use of a handle allocates nothing and copies no name. The memory of the submission must
  // live until the work is done. Thread-safe. InvalidArgument for bad input; a failed engine
  // returns its first failure.
  absl::StatusOr<UsePtr> Submit(const std::shared_ptr<const Bucket>& bucket,
                                const Submission& submission);

  // Register and Submit in one. An empty tensor is done at once.
  absl::StatusOr<UsePtr> Start(const CollectiveRequest& request);

  // Fails the group on every rank with `reason`; from any thread. Returns when every rank has
  // received it, or can no longer, after half a second at most: the process may end then.
  void Abort(absl::Status reason);
  absl::Status status() const { return failure_.status(); }  // the first failure, or OK

  Stats stats() const;

  // Human-readable: which ranks wait for which, and the last events. At any time, from any thread.
  std::string Describe() const;

  // The residuals. Use only while nothing is in flight.
  ErrorFeedback& error_feedback() { return tensors_.feedback(); }

  // The codecs of Options in this world: topk becomes int4 if that costs fewer bytes.
  const std::vector<CodecPair>& codecs() const { return options_.codecs; }

  // True if an allreduce of a tensor of this size and dtype goes uncompressed.
  bool GoesRaw(const TensorView& input) const;

  // Sets the step number of the next use of every name, which topk's warm-up and stochastic
  // rounding depend on. 0 at first; set it when a run is resumed.
  void SetStep(uint64_t step) { tensors_.SetStep(step); }

  // Call when all of a training step has been submitted, and the next step will submit the same
  // tensors. If ranks are far apart, their order is then predicted. Only rank 0's call counts.
  void EndStep();
  // Call in place of EndStep if the next step may submit other tensors.
  void ForgetStep();

 private:
  // `options`: settled for this world. Call StartThreads next.
  Engine(const Options& options, Transport transport, std::shared_ptr<Device> device);

  // Makes the lanes and starts the threads; a world of one needs neither. Fails if the device does.
  absl::Status StartThreads();
  absl::Status Reserve(const Bucket& bucket);
  absl::Status Refusal(const Bucket& bucket, const absl::Status& status) const;
  absl::Status RunLocal(Use& use);
  template <typename Event>
  void TellSequencer(Event event);
  void CarryOut(const Action& action);
  void Send(int to, const OrderMessage& message);
  void MeasureLatency();
  void OnChunkEnd(const StartChunk& start, absl::Status status);
  void Count(const Use& use);
  void Retire(Use& use, Use::Left left);
  void KeepTime();
  void EndAll();
  void ReadFrames();
  void OnFrame(const ControlMessage& message);

  const Options options_;
  Transport transport_;                   // empty in a world of one
  const std::shared_ptr<Device> device_;  // null: the host
  const Membership members_;
  const Matching matching_;
  const uint64_t sent_before_;  // bytes that the plane sent while its links were measured
  Records records_;
  FailureProtocol failure_;
  Farewell farewell_;
  Tensors tensors_;
  Workspaces chunk_spaces_, direct_spaces_;  // for chunks in order, and for all others

  std::unique_ptr<Executor> executor_;  // null in a world of one

  mutable absl::Mutex mu_;
  Sequencer sequencer_ ABSL_GUARDED_BY(mu_);
  // A thread is carrying out actions; others leave theirs in the outbox for it.
  bool carrying_ ABSL_GUARDED_BY(mu_) = false;
  Outbox batch_;  // owned by the thread that has set carrying_
  std::thread reader_, timekeeper_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_ENGINE_H_
