// Group: wires an engine's parts together. Each part has one duty, and at most one lock:
//
//   Tensors          registered buckets, their residuals, and their uses in flight
//   Sequencing       hosts the sequencer: reports in, order out
//   Executor         runs the chunks that the sequencer starts
//   DirectPath       exchanges small tensors at once
//   FailureProtocol  the first reason, and its way to everybody
//   Farewell         the goodbyes
//   Standstill       whether this process was stopped for a while
//   Records          statistics, events, trace
//
// A bucket comes in by Submit, on the caller's thread; its use leaves by Retire, on the thread that
// ended it. A thread of the group's own takes in control frames, and another keeps the time.
#ifndef THINWIRE_SCHEDULE_ENGINE_GROUP_H_
#define THINWIRE_SCHEDULE_ENGINE_GROUP_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "schedule/engine.h"
#include "schedule/engine/direct_path.h"
#include "schedule/engine/ending.h"
#include "schedule/engine/executor.h"
#include "schedule/engine/lane.h"
#include "schedule/engine/records.h"
#include "schedule/engine/sequencing.h"
#include "schedule/engine/tensors.h"

namespace thinwire {

class Group final : public Engine {
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
  ErrorFeedback& error_feedback() override { return tensors_.feedback(); }
  const std::vector<CodecPair>& codecs() const override { return options_.codecs; }
  bool GoesRaw(const TensorView& input) const override;
  void SetStep(uint64_t step) override { tensors_.SetStep(step); }
  void EndStep() override;

 private:
  absl::Status MakeDirectPath(ChunkListener on_end);
  absl::Status Reserve(const Bucket& bucket);
  absl::Status Refusal(const Bucket& bucket, const absl::Status& status) const;
  absl::Status RunLocal(Use& use);
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
  const int slots_;             // lanes at most, the direct path's included; of every fence
  const uint64_t sent_before_;  // by the plane, while its links were measured
  Records records_;
  Standstill standstill_;
  FailureProtocol failure_;
  Farewell farewell_;
  Tensors tensors_;
  Lanes chunk_lanes_, direct_lanes_;  // of chunks in order, and of all others

  // Null in a world of one. Later ones use the earlier ones.
  std::unique_ptr<DirectPath> direct_path_;  // null as well where no bucket goes that way
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Sequencing> sequencing_;
  std::thread reader_, timekeeper_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_GROUP_H_
