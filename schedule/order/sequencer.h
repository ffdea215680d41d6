// Sequencer: one rank's part in the order of chunks. Reports go in, the order comes out.
//
// Every rank reports its tensors to rank 0. Its Leader announces chunks that all ranks have; its
// Prediction orders a whole step ahead if ranks are far apart. Ordered chunks start as StartQueue
// describes: the oldest unfinished chunk is submitted and has a lane on every rank, so it finishes.
// In a large world group heads sum up reports and pass on rank 0's messages: ControlTree.
//
// Pure logic: every event carries the time, in seconds of any one clock, and actions go into an
// outbox, in order. The engine and the simulator host the same object. Nothing in this header is
// thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_
#define THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/containers.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/order/prediction.h"
#include "schedule/order/start_queue.h"
#include "transport/membership.h"
#include "transport/planes.h"

namespace thinwire {

// A tensor's place in the order. Both counts are of one counter, so no two tensors share a value.
struct Place {
  uint64_t submitted = 0;  // when the first rank reported it
  uint64_t complete = 0;   // when all ranks had reported it
  int32_t priority = 0;    // lower goes first
};

// True if a ready tensor at `a` goes before one at `b`: a strict order for each policy.
constexpr bool GoesBefore(Policy policy, const Place& a, const Place& b) {
  if (policy == Policy::kFifo) return a.submitted < b.submitted;
  if (policy == Policy::kP3 && a.priority != b.priority) return a.priority < b.priority;
  return a.complete < b.complete;
}

// Leader: rank 0's record of which rank has which tensor ready, and the order that follows from it.
//
// Collectives deadlock if each rank chooses among what is ready locally. So the leader orders the
// chunks that *all* ranks have reported, by policy, and all ranks start them in that order.
class Leader {
 public:
  // At most `window_bytes` of fp32 input are announced and unfinished (but at least one chunk).
  Leader(int world, Policy policy, size_t window_bytes);

  // FailedPrecondition if `rank` describes the tensor differently from an earlier rank. A repeated
  // report from one rank has no effect.
  absl::Status OnReport(int rank, const Report& report);

  void SetWindow(size_t bytes) { window_bytes_ = bytes; }

  // The tensor is predicted, so its chunks are not announced.
  void Expect(const Report& report);
  bool Expects(uint64_t id) const;
  // A predicted tensor that `rank` has not reported; null if there is none.
  const Report* Unreported(int rank) const;
  // Withdraws the predicted tensors that rank 0 has not reported although they came before `id` in
  // the step before, and all ranks have `id` now: rank 0's step seems to lack them. They are no
  // longer predicted, and are announced if they come. Appends them to `withdrawn`.
  void WithdrawBefore(uint64_t id, std::vector<Withdrawal>* withdrawn);
  // The same for all predicted tensors that rank 0 has not reported: its step is over.
  void WithdrawAll(std::vector<Withdrawal>* withdrawn);
  // The same for all predicted tensors that all ranks have; their chunks are then announced. Chunks
  // that rank 0 has started, by `book`, are appended to `order` at once: they need no room in the
  // window.
  void WithdrawReady(TensorBook& book, std::vector<Withdrawal>* withdrawn,
                     std::vector<Announcement>* order);
  // True if all ranks have reported it.
  bool AllHave(uint64_t id) const;

  // Appends the chunks to announce now, in order. They count as announced.
  void Next(std::vector<Announcement>* order);
  // True if all chunks that all ranks have are announced, so that none waits for room in the
  // window.
  bool AllAnnounced() const { return ready_.empty(); }

  // Rank 0 has submitted a tensor: direct, announced or predicted.
  void OnSubmitted(const Report& report);
  // True if OnSubmitted was called for the tensor.
  bool WasSubmitted(const Report& report) const;
  // A chunk is finished on rank 0. If it started as an announced one, this frees its part of the
  // window.
  void OnChunkDone(uint64_t id, bool predicted);
  // A direct tensor is finished: forgets it.
  void Forget(uint64_t id) { tensors_.Erase(id); }

  // A rank says that the tensor passed its deadline there.
  void OnOverdue(uint64_t id, double now);
  // The overdue tensors, each with the time of the first OnOverdue.
  struct Overdue {
    uint64_t id;
    double since;
  };
  const std::vector<Overdue>& overdue() const { return overdue_; }

  // Explains why the tensor passed its deadline: a rank never submitted it or a predicted tensor
  // before it, or fell silent. `silent`: the ranks that do not answer. Always an error.
  absl::Status Diagnose(uint64_t id, const std::vector<int>& silent) const;

  // Human-readable: one line for each tensor that not all ranks have reported.
  std::string Describe() const;

 private:
  struct Tensor {
    Report first;  // as the first rank reported it
    int first_rank = 0;
    std::vector<bool> reported;  // by rank
    int reports = 0;
    uint64_t submitted = 0;  // clock_ at the first report
    uint64_t complete = 0;   // clock_ at the last report
    uint64_t predicted = 0;  // clock_ at the prediction; 0: not predicted
    uint32_t announced = 0;  // chunks
    uint32_t done = 0;
  };

  Tensor& Find(int rank, const Report& report);
  bool Before(const Tensor& a, const Tensor& b) const;
  void Withdraw(uint64_t before, std::vector<Withdrawal>* withdrawn);
  bool FollowsSurely(size_t bytes) const;
  const Tensor* HoldsUp(const Tensor& late) const;
  absl::Status NeverSubmitted(const Tensor& tensor, const std::string& consequence,
                              const std::vector<int>& silent, const std::string& fix) const;
  std::string WaitingFor(int rank, uint64_t except) const;

  const int world_;
  const Policy policy_;
  size_t window_bytes_;
  size_t unfinished_bytes_ = 0;
  size_t undrained_bytes_ = 0;  // of the last announced chunk, if it waits for a follower
  size_t largest_chunk_ = 0;
  uint64_t clock_ = 0;            // counts reports and predictions
  RecycledMap<Tensor> tensors_;   // by id
  std::vector<uint64_t> ready_;   // ids with chunks to announce, in no order
  RingQueue<uint64_t> expected_;  // ids in Expect's order; rank 0 may have reported some
  RecycledMap<uint64_t> calls_;   // number of calls submitted on rank 0, by key
  std::vector<Overdue> overdue_;
};

// How long a peer may owe an answer before it counts as silent, in seconds, for a group's timeout
// in seconds: on a busy link the answer waits behind chunks, and on a busy machine for a processor.
inline double AnswerPatience(double timeout) { return std::clamp(timeout / 20, 0.25, 1.5); }

// A roll call finds which peers answer, and their latency. A rank that waits for a tensor pings
// ahead of the deadline, so that it knows at the deadline which peers are silent. Rank 0 pings each
// peer a few times before anything else, since later answers may wait behind chunks; the least time
// counts.
class RollCall {
 public:
  // A peer that owes no answer is pinged again after `pause` seconds; it is silent once it has owed
  // an answer for `patience` seconds.
  RollCall(int world, double pause, double patience)
      : pause_(pause), patience_(patience), peers_(world) {}

  // True if the caller must ping the peer now; the ping counts as sent.
  bool Ask(int peer, double now) {
    if (peers_[peer].owes || now < peers_[peer].asked + pause_) return false;
    AskNow(peer, now);
    return true;
  }
  void AskNow(int peer, double now) {
    peers_[peer].owes = true;
    peers_[peer].asked = now;
  }
  // True if the peer has not yet given enough answers for its latency to be known.
  bool OnAnswer(int peer, double now) {
    Peer& p = peers_[peer];
    if (p.owes) p.round_trip = std::min(p.round_trip, now - p.asked);
    p.owes = false;
    if (++p.answers < kAnswers) return true;
    if (p.answers == kAnswers) ++measured_;
    return false;
  }

  // True if all peers' latency is known.
  bool measured() const { return measured_ + 1 == static_cast<int>(peers_.size()); }
  // One way, to the farthest peer that has answered, in seconds.
  double latency_s() const {
    double farthest = 0.0;
    for (const Peer& p : peers_) {
      if (p.answers > 0) farthest = std::max(farthest, p.round_trip / 2);
    }
    return farthest;
  }

  bool IsSilent(int peer, double now) const {
    return peers_[peer].owes && now >= peers_[peer].asked + patience_;
  }
  // True if every peer has answered or is silent.
  bool IsSettled(double now) const {
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (peers_[peer].owes && !IsSilent(peer, now)) return false;
    }
    return true;
  }
  std::vector<int> Silent(double now) const {
    std::vector<int> silent;
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (IsSilent(peer, now)) silent.push_back(peer);
    }
    return silent;
  }

 private:
  static constexpr int kAnswers = 5;

  struct Peer {
    double asked = -std::numeric_limits<double>::infinity();
    double round_trip = std::numeric_limits<double>::max();
    int answers = 0;
    bool owes = false;
  };
  const double pause_, patience_;
  std::vector<Peer> peers_;  // by rank
  int measured_ = 0;         // peers that have given all kAnswers answers
};

// ControlTree: the ranks through which reports reach rank 0, and its announcements come back. In a
// small world every rank talks to rank 0. In a large one ranks form groups of about sqrt(n)
// neighbours, and the first rank of each, the group head, sums up their reports; so rank 0 handles
// about 2 sqrt(n) frames for a tensor, in place of 2 (n - 1).
class ControlTree {
 public:
  // `from`: the least number of ranks that form groups.
  ControlTree(const Membership& members, int from)
      : members_(members), group_(GroupSize(members.size, from)) {
    if (!is_head()) return;
    if (group_ == members.size) {
      children_ = {kEveryone};
      return;
    }
    for (const int rank : GroupOf(members.rank)) {
      if (rank != members.rank) children_.push_back(rank);
    }
    for (int head = group_; members.rank == 0 && head < members.size; head += group_) {
      children_.push_back(head);
    }
  }

  int head() const { return HeadOf(members_.rank); }
  bool is_head() const { return head() == members_.rank; }
  int HeadOf(int rank) const { return rank / group_ * group_; }
  // The rank from which rank 0's messages come: the group head, or for a head rank 0.
  int parent() const { return is_head() ? 0 : head(); }
  // The ranks of a head's group, including the head.
  std::vector<int> GroupOf(int head) const {
    std::vector<int> ranks;
    for (int r = head; r < std::min(head + group_, members_.size); ++r) ranks.push_back(r);
    return ranks;
  }

  // The ranks to which this rank passes on rank 0's messages; kEveryone in a small world.
  const std::vector<int>& children() const { return children_; }

  // On a head: a rank of its group, which may be itself, reports a tensor. Call once per rank and
  // tensor. True if all of the group have now reported it; it is then forgotten. Fails like
  // CheckAgreement.
  absl::StatusOr<bool> SumUp(int rank, const Report& report);

 private:
  struct Reported {
    Report first;  // as the first rank reported it
    int first_rank = 0;
    int reports = 0;
  };

  static int GroupSize(int world, int from) {
    if (world < from) return world;
    return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(world))));
  }

  const Membership members_;
  const int group_;
  std::vector<int> children_;
  RecycledMap<Reported> reported_;  // by id, of a head's group
};

class Sequencer {
 public:
  // With Matching::kByOrder all chunks, announced and predicted, start in one order, the same on
  // all ranks; with kByTag a predicted chunk may overtake one that its rank has not submitted.
  // `hop_shares`: each hop's share of a chunk's bytes (HopShares of
  // schedule/collective/partition.h), for predictions and for the window. `shared`: a book of all
  // ranks' tensors, which must outlive the sequencer; null: the sequencer keeps its own.
  Sequencer(const Membership& members, const Options& options, Matching matching,
            std::vector<double> hop_shares, TensorBook* shared = nullptr);

  // Rank 0 measures its peers' latency. measured() is true once it is known for all.
  void Begin(double now);
  bool measured() const { return leader_ == nullptr || roll_.measured(); }

  // This rank has submitted a tensor. A direct one is reported only when it is late. The sequencer
  // keeps `report`, which must not change, and `host` until the tensor is done; `host` is returned
  // with each chunk that starts.
  void OnSubmit(std::shared_ptr<const Report> report, double now,
                std::shared_ptr<void> host = nullptr);
  // A report, announcement, prediction, withdrawal, ping or pong has arrived.
  void OnMessage(int from, const OrderMessage& message, double now);
  // A hop of a predicted chunk has ended here. No effect if the chunk is already done.
  void OnHopDone(const StartChunk& chunk, double now);
  // A chunk is done here. `last`: its tensor is done, too.
  void OnChunkDone(const StartChunk& chunk, bool last, double now);
  // A direct tensor is done here.
  void OnDirectDone(uint64_t id);
  // This rank has submitted all of a step, and the next step will have the same tensors. Only rank
  // 0's call has an effect. Predicted tensors that rank 0 left out are withdrawn; with
  // Matching::kByOrder such a tensor fails the group, since all later chunks wait for it. With
  // kByOrder the next step must also wait for the same tensors before it submits the same others:
  // no other order is known to be free of deadlock.
  void EndStep(double now);
  // This rank has submitted all of a step, and the next step may have other tensors. Only rank 0's
  // call has an effect. Predicted tensors that rank 0 left out are withdrawn, with
  // Matching::kByTag.
  void ForgetStep(double now);
  // Call from time to time: finds late and overdue tensors and silent ranks. With Matching::kByTag
  // rank 0 also ends a standstill: if none of its predicted chunks has made progress for
  // AnswerPatience(timeout), it withdraws the predicted tensors that all ranks have, and each other
  // one of the step as soon as all ranks have it.
  void OnClock(double now);

  // Actions to be done, in order. The host must carry out all of them.
  Outbox& outbox() { return outbox_; }

  // Human-readable: who waits for whom.
  std::string Describe() const;

 private:
  void SendReport(FrameType type, const Report& report, double now);
  void OnReport(int rank, FrameType type, const Report& report, double now);
  void OnReports(std::span<const int> ranks, const Report& report, double now);
  void OnGroupReport(int rank, const Report& report);
  void ReportAnew();
  void PassOn(const std::vector<Announcement>& announcements);
  void PassOn(const std::vector<PredictedChunk>& chunks);
  void PassOn(const std::vector<Withdrawal>& withdrawn);
  bool FinishedHere(const Report& report) const;
  void Announce();
  void Predict();
  void Withdraw();
  void OnPong(int peer, double now);
  void CallRoll(double now);
  void FindOverdue(double now);
  void JudgeOverdue(double now);
  void EndStandstill(double now);  // on rank 0, as OnClock describes
  void OnOrder(int from, const OrderMessage& message);
  size_t WindowBytes(double seconds) const;
  void Fail(absl::Status reason, int silent = 0) { outbox_.Fail(std::move(reason), silent); }

  const Membership members_;
  const Matching matching_;
  bool predicts_;                         // on rank 0: steps go in the predicted order
  const std::unique_ptr<Leader> leader_;  // null except on rank 0, as the next one
  const std::unique_ptr<Prediction> prediction_;
  const std::unique_ptr<TensorBook> alone_;  // null with a shared book
  TensorBook& book_;
  Outbox outbox_;
  StartQueue starts_;
  ControlTree tree_;
  RollCall roll_;  // on rank 0 of all ranks, elsewhere of rank 0
  const Options options_;
  std::vector<Announcement> announcing_;
  std::vector<Withdrawal> withdrawing_;
  // When a hop of a predicted chunk last ended, or all ranks last had one more predicted tensor.
  double moved_ = 0.0;
  bool distrusts_ = false;  // on rank 0: the step's predicted order had a standstill
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_SEQUENCER_H_
