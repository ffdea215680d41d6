// Sequencer: one rank's part in the order of chunks. Reports go in, the order comes out.
//
// Every rank reports its tensors to rank 0, whose Leader announces chunks that all ranks have, and
// whose Prediction says a whole step's order ahead where ranks are far apart. What is ordered
// starts as StartQueue says: the oldest unfinished chunk is submitted and has a lane on every rank,
// so it finishes. In a large world heads of groups sum reports up, and pass on what rank 0 says:
// ControlTree.
//
// Pure logic: time comes in with every event, in seconds of any one clock, and what is to be done
// goes into an outbox, in order. The engine and the simulator host the same object. Not
// thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_
#define THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/leader.h"
#include "schedule/order/outbox.h"
#include "schedule/order/peers.h"
#include "schedule/order/prediction.h"
#include "schedule/order/start_queue.h"
#include "schedule/recycled.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

class Sequencer {
 public:
  // With Matching::kByOrder all chunks, announced and predicted, start in one order, the same on
  // all ranks; with kByTag a predicted chunk may overtake one that its rank has not submitted.
  // `hop_shares`: of a chunk's bytes, by hop (HopShares of schedule/collective/partition.h); rank 0
  // predicts with them, and the window counts by them. `shared`: a book of all ranks' tensors,
  // which outlives the sequencer; null: the sequencer keeps its own.
  Sequencer(const Membership& members, const Options& options, Matching matching,
            std::vector<double> hop_shares, TensorBook* shared = nullptr);

  // Rank 0 asks its peers for their latency. measured() is true once all have answered.
  void Begin(double now);
  bool measured() const { return lead_ == nullptr || lead_->probe.complete(); }

  // This rank has submitted a tensor. A direct one is reported only when it is late. The sequencer
  // keeps `report`, which nobody changes meanwhile, and `host`, until the tensor is done; `host` is
  // whatever the host wants back with each chunk that starts.
  void OnSubmit(std::shared_ptr<const Report> report, double now,
                std::shared_ptr<void> host = nullptr);
  // A report, announcement, prediction, ping or pong has come.
  void OnMessage(int from, const OrderMessage& message, double now);
  // A hop of a predicted chunk has ended here. Of a chunk that is done it changes nothing.
  void OnHopDone(const StartChunk& chunk, double now);
  // A chunk is done here. `last`: so is its tensor.
  void OnChunkDone(const StartChunk& chunk, bool last, double now);
  // A direct tensor is done here.
  void OnDirectDone(uint64_t id);
  // This rank has submitted all of a step, and the next step will have the same tensors. Rank 0's
  // call counts. A predicted tensor that rank 0 left out fails the group.
  void EndStep(double now);
  // This rank has submitted all of a step, and the next step may be another. Rank 0's call counts.
  void ForgetStep(double now);
  // Some time has passed: finds what is late, overdue, or never answered.
  void OnClock(double now);

  // Actions to be done, in order. Whoever takes them does all of them.
  Outbox& outbox() { return outbox_; }

  // Says who waits for whom, for people.
  std::string Describe() const;

 private:
  // The parts that only rank 0 has.
  struct Lead {
    Lead(int world, const Options& options, std::vector<double> hop_shares);
    Leader leader;
    Prediction prediction;
    LatencyProbe probe;
    RecycledMap<uint64_t> calls;  // submitted here, by key
    bool predicts;
    std::vector<std::pair<uint64_t, double>> overdue;  // ids, since when
  };

  void SendReport(FrameType type, const Report& report, double now);
  void OnReport(int rank, FrameType type, const Report& report, double now);
  void OnReports(std::span<const int> ranks, const Report& report, double now);
  void OnGroupReport(int rank, const Report& report);
  void ReportAnew();
  void PassOn(const std::vector<Announcement>& announcements);
  void PassOn(const std::vector<PredictedChunk>& chunks);
  bool FinishedHere(const Report& report) const;
  void Announce();
  void Predict();
  void OnPong(int peer, double now);
  void CallRoll(double now);
  void FindOverdue(double now);
  void JudgeOverdue(double now);
  void OnOrder(int from, const OrderMessage& message);
  size_t WindowBytes(double seconds) const;
  void Fail(absl::Status reason, int silent = 0) { outbox_.Fail(std::move(reason), silent); }

  const Membership members_;
  const Matching matching_;
  const std::unique_ptr<Lead> lead_;  // rank 0
  const ControlTree tree_;
  const std::unique_ptr<TensorBook> alone_;  // null with a shared book
  OwnTensors own_;
  Outbox outbox_;
  StartQueue starts_;
  GroupReports group_;  // of a head
  RollCall roll_;       // of everybody on rank 0, of rank 0 elsewhere
  const Options options_;
  std::vector<Announcement> announcing_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_
