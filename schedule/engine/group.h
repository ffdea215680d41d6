// Group: wires an engine's parts together. Each part has one duty, and at most one lock:
//
//   Works            registered buckets, works in flight, residuals bound to them
//   Sequencing       hosts the sequencer: reports in, order out
//   Executor         runs the chunks that the sequencer starts
//   DirectPath       exchanges small tensors at once; LocalPath copies in a world of one
//   FailureProtocol  the first reason, and its way to everybody
//   Farewell         the goodbyes
//   ReplicaCheck     whether all ranks got the same bits
//   Pulse            whether this process stood still
//   Watchdog, ControlReader   a thread each: the time, and the frames
//
// A bucket comes in by Submit, on the caller's thread; a work leaves by Retire, on the thread that
// ended it.
#ifndef THINWIRE_SCHEDULE_ENGINE_GROUP_H_
#define THINWIRE_SCHEDULE_ENGINE_GROUP_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "schedule/engine.h"
#include "schedule/engine/control_reader.h"
#include "schedule/engine/direct_path.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/failure.h"
#include "schedule/engine/farewell.h"
#include "schedule/engine/flight_recorder.h"
#include "schedule/engine/local_path.h"
#include "schedule/engine/pulse.h"
#include "schedule/engine/replica_check.h"
#include "schedule/engine/sequencing.h"
#include "schedule/engine/stage_clock.h"
#include "schedule/engine/trace.h"
#include "schedule/engine/watchdog.h"
#include "schedule/engine/works.h"
#include "schedule/engine/workspace.h"

namespace thinwire {

class Group final : public Engine, public ChunkHost {
 public:
  // `options` as they are in this world. Start comes next.
  Group(const Options& options, Transport transport, std::shared_ptr<Device> device);
  ~Group() override;

  // Makes the lanes and starts the threads; a world of one needs neither. Fails with the device.
  absl::Status StartThreads();

  absl::StatusOr<std::shared_ptr<const Bucket>> Register(const BucketRequest& request) override;
  absl::StatusOr<std::shared_ptr<Work>> Submit(const std::shared_ptr<const Bucket>& bucket,
                                               const Submission& submission) override;
  void Abort(absl::Status reason) override;
  absl::Status status() const override { return failure_.status(); }
  Stats stats() const override;
  std::string Describe() const override;
  ErrorFeedback& error_feedback() override { return works_.feedback(); }
  const std::vector<CodecPair>& codecs() const override { return options_.codecs; }
  bool GoesRaw(const TensorView& input) const override;
  void SetStep(uint64_t step) override { works_.SetStep(step); }
  void EndStep() override;

  WorkPtr BeginChunk(const StartChunk& start) override { return works_.BeginChunk(start.id); }
  void EndChunk(const StartChunk& start, const WorkPtr& work, absl::Status status) override;

 private:
  enum class Outcome { kDone, kFailed };

  absl::StatusOr<std::unique_ptr<Lane>> MakeLane(Workspaces& spaces, int slot);
  absl::Status Reserve(const Bucket& bucket);
  absl::Status MakeExecutor();
  absl::Status MakeDirectPath();
  absl::Status Refusal(const Bucket& bucket, const absl::Status& status) const;
  absl::Status RunLocal(const WorkPtr& work);
  void Count(const InFlight& work);
  void Retire(const WorkPtr& work, Outcome outcome);
  void EndAll();

  const Options options_;
  Transport transport_;                   // empty in a world of one
  const std::shared_ptr<Device> device_;  // null: the host
  const Membership members_;
  const Matching matching_;
  const int slots_;  // lanes at most, the direct path's included; of every fence
  FlightRecorder recorder_;
  StageTotals totals_;
  std::unique_ptr<Trace> trace_;  // null without one
  std::atomic<uint64_t> collectives_{0}, raw_bytes_{0};
  const uint64_t sent_before_;  // by the plane, while its links were measured
  Pulse pulse_;
  FailureProtocol failure_;
  Farewell farewell_;
  ReplicaCheck replicas_;
  Works works_;
  Workspaces chunk_spaces_, direct_spaces_;  // of chunks in order, and of all others
  LocalPath local_path_;
  // Null in a world of one. Threads of a later one use the earlier ones.
  std::unique_ptr<DirectPath> direct_path_;  // null as well where no bucket goes that way
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Sequencing> sequencing_;
  std::unique_ptr<ControlReader> reader_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_GROUP_H_
