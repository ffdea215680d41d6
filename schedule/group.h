// Group: the engine of more than one rank. Its threads and what they share:
//
//   callers   submit; a report goes to the leader, or a small tensor straight to all peers
//   control   receives frames: reports and overdue notes (leader), announcements, failures
//   lanes     take announced chunks in order and run AllReduceChunk
//   plan      lanes likewise, for chunks that were announced before they were ready
//   raw       finishes small tensors whose callers do not wait
//   posts     starts small tensors of a device, so that callers do not wait for it
//   watchdog  reports what is late, and ends what is past its deadline
//
// Locks: order_mu_ (the leader's book, and that announcements leave in one order) before mu_.
#ifndef THINWIRE_SCHEDULE_GROUP_H_
#define THINWIRE_SCHEDULE_GROUP_H_

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "compress/backend.h"
#include "schedule/blocking_queue.h"
#include "schedule/chunk_allreduce.h"
#include "schedule/engine.h"
#include "schedule/foresight.h"
#include "schedule/in_flight.h"
#include "schedule/lane.h"
#include "schedule/leader.h"
#include "schedule/plan_window.h"
#include "schedule/stage_clock.h"
#include "schedule/trace.h"

namespace thinwire {

class Group final : public Engine {
 public:
  // options.lanes lanes and one more for small tensors, of `transport` and `device` (may be null).
  using Lanes = std::vector<std::unique_ptr<Lane>>;
  static absl::StatusOr<Lanes> MakeLanes(const Options& options, Transport& transport,
                                         Device* device);
  // Codecs become what they are in a world of `size`.
  static Options Settle(Options options, int size);

  // `options` settled.
  Group(const Options& options, std::unique_ptr<Transport> transport,
        std::shared_ptr<Device> device, Lanes lanes);
  ~Group() override;

  absl::StatusOr<std::shared_ptr<Work>> AllReduce(const AllReduceRequest& request) override;
  void Abort(absl::Status reason) override { Fail(std::move(reason), Tell::kEveryone); }
  absl::Status status() const override;
  Stats stats() const override;
  ErrorFeedback& error_feedback() override { return feedback_; }
  const std::vector<CodecPair>& codecs() const override { return options_.codecs; }
  bool GoesRaw(const TensorView& input) const override;
  void SetStep(uint64_t step) override;
  void EndStep() override;

 private:
  using WorkPtr = std::shared_ptr<InFlight>;
  enum class Tell { kEveryone, kNobody };

  struct KeyState {
    uint64_t calls = 0;
    bool in_flight = false;
    uint64_t step = 0;
    uint64_t layout = 0;  // hash of what the plan was made for
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<uint32_t[]> thresholds;  // of topk, by chunk
  };

  // group.cc: submission and the ends of works.
  absl::StatusOr<WorkPtr> Register(const AllReduceRequest& request);
  absl::Status PrepareLocked(const AllReduceRequest& request, InFlight* work);
  void PlanLocked(const std::vector<Segment>& segments, KeyState* state) const;
  bool NeedsMemory(const std::vector<Segment>& segments, bool raw) const;
  void StartRaw(const WorkPtr& work, bool caller_waits);
  void PostRaw(const WorkPtr& work);
  void FinishRaw(const WorkPtr& work);
  enum class Outcome { kDone, kFailed };
  void Retire(const WorkPtr& work, Outcome outcome);
  void Count(const InFlight& work);

  // group_order.cc: what is said on the control channel.
  void Submit(FrameType type, const InFlight& work);
  void OnReport(int rank, FrameType type, const Report& report);
  absl::Status ReportLocked(int rank, FrameType type, const Report& report);
  bool FinishedHere(const Report& report) const;
  void AnnounceLocked();
  void OnFrame(const ControlMessage& message);
  void OnBye();
  void SayBye();
  void ControlLoop();

  // group_lanes.cc
  void LaneLoop(int lane);
  void RunChunk(Lane& lane, int number, const Announcement& announcement);
  void EndChunk(const WorkPtr& work, const absl::Status& status);
  void RawLoop();
  void PostLoop();

  // group_plan.cc
  void MeasureLatency();
  void SendPing(int peer);
  void OnPong(int peer);
  void RememberLocked(int rank, const Report& report);
  void ForgetLocked(uint64_t id);
  void PlanLocked();
  size_t WindowBytes(int latencies) const;
  void OnPlan(const std::vector<PlannedChunk>& chunks);
  void PlanLoop(int number);
  struct Planned {
    PlannedChunk chunk;
    uint64_t place;  // among all planned chunks
  };
  bool AwaitTurn(const Planned& planned);
  bool AsPlanned(const InFlight& work, const PlannedChunk& chunk);
  void EndTurn(const Planned& planned);

  // group_failure.cc
  void Fail(absl::Status reason, Tell tell);
  void OnEchoes(int peers);
  void EndAll();
  void AwaitTold();
  void FailFromTransport(absl::Status status, const std::string& name);
  void WatchdogLoop();
  void ReportLate(Clock::time_point now);
  absl::Status Expired(Clock::time_point now);
  void CompleteAfterFailure();
  absl::Status Explain(const std::string& name, const absl::Status& status) const;

  const Options options_;
  const std::unique_ptr<Transport> transport_;
  const std::shared_ptr<Device> device_;  // null: the host
  const Lanes lanes_;                     // the last one is for small tensors
  Lane& raw_lane_;
  const int rank_, size_;
  std::unique_ptr<Trace> trace_;  // null without one
  StageTotals totals_;
  std::atomic<uint64_t> all_reduces_{0}, raw_bytes_{0};

  std::mutex order_mu_;
  // Used on rank 0 only.
  Leader leader_;
  Foresight foresight_;
  struct Ping {
    Clock::time_point sent;
    Clock::duration least = Clock::duration::max();  // there and back
    int answers = 0;
  };
  std::vector<Ping> pings_;  // by rank
  int peers_measured_ = 0;
  std::condition_variable measured_;  // peers_measured_
  double latency_s_ = 0.0;            // one way, to the farthest rank
  bool foretells_;

  mutable std::mutex mu_;
  std::condition_variable changed_;    // status_, byes_, echoes_ or told_
  std::condition_variable submitted_;  // works_ or status_
  std::condition_variable admitted_;   // window_ or status_
  PlanWindow window_;
  absl::Status status_;
  int byes_ = 0;       // peers that have finished
  int echoes_ = 0;     // peers that have failed as well, or can't say so
  bool told_ = false;  // status_ may be handed out
  ErrorFeedback feedback_;
  uint64_t first_step_ = 0;                        // of keys not yet seen
  std::unordered_map<uint64_t, KeyState> keys_;    // by hash of the name
  std::unordered_map<uint64_t, WorkPtr> works_;    // by id, until complete
  std::map<uint64_t, Clock::time_point> overdue_;  // leader only: ids, since when

  std::vector<std::unique_ptr<LaneBuffers>> raw_buffers_;  // to be used again

  BlockingQueue<Announcement> announced_;
  BlockingQueue<Planned> planned_;
  uint64_t next_place_ = 0;  // of a planned chunk; used where plans come in
  BlockingQueue<WorkPtr> raw_, posts_;
  std::vector<std::thread> threads_;
  std::vector<std::thread> plan_threads_;  // from the first plan on; under mu_
  std::atomic<uint64_t> planned_chunks_{0};
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_GROUP_H_
