// Leader: rank 0's book of which rank has which tensor ready, and the order that it makes of it.
//
// Collectives deadlock when ranks choose by what is ready locally. So among the chunks that *all*
// ranks have reported the leader takes the first by policy, and all ranks start chunks in that
// order. Pure logic: no threads, no clock, no transport. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_ORDER_LEADER_H_
#define THINWIRE_SCHEDULE_ORDER_LEADER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "schedule/options.h"
#include "schedule/order/frames.h"
#include "schedule/recycled.h"

namespace thinwire {

// A tensor's place in the order. The two counts are of one clock, so no two tensors share one.
struct Place {
  uint64_t submitted = 0;  // when the first rank had it
  uint64_t complete = 0;   // when all ranks had it
  int32_t priority = 0;    // lower goes first
};

// True if a ready tensor at `a` goes before one at `b`: a strict order for each policy.
constexpr bool GoesBefore(Policy policy, const Place& a, const Place& b) {
  if (policy == Policy::kFifo) return a.submitted < b.submitted;
  if (policy == Policy::kP3 && a.priority != b.priority) return a.priority < b.priority;
  return a.complete < b.complete;
}

class Leader {
 public:
  // At most `window_bytes` of fp32 input are announced and unfinished (but always one chunk).
  Leader(int world, Policy policy, size_t window_bytes);

  // FailedPrecondition when `rank` describes the tensor otherwise than an earlier rank did. A
  // repeated report of one rank changes nothing.
  absl::Status OnReport(int rank, const Report& report);

  void SetWindow(size_t bytes) { window_bytes_ = bytes; }

  // The tensor will come, and its chunks are predicted, so they are not announced.
  void Expect(const Report& report);
  bool Expects(uint64_t id) const;
  // A predicted tensor that `rank` has not reported; null if there is none.
  const Report* Unreported(int rank) const;
  // True if all ranks have reported it.
  bool AllHave(uint64_t id) const;

  // Appends the chunks to announce now, in order. They count as announced.
  void Next(std::vector<Announcement>* order);
  // True if nothing waits for the window that all ranks have.
  bool AllAnnounced() const { return ready_.empty(); }

  // A chunk is finished on the leader's own rank, which frees its part of the window.
  void OnChunkDone(uint64_t id);
  // A direct tensor is finished; nothing more is to be known of it.
  void Forget(uint64_t id) { tensors_.Erase(id); }

  // Why the tensor passed its deadline: a rank that never submitted it, or a predicted tensor
  // before it, or that fell silent. `silent`: the ranks that do not answer. Always an error.
  absl::Status Diagnose(uint64_t id, const std::vector<int>& silent) const;

  // Says who waits for whom, for people: one line a tensor that is not reported by all ranks.
  std::string Describe() const;

 private:
  struct Tensor {
    Report first;  // as the first rank reported it
    int first_rank = 0;
    std::vector<bool> reported;  // by rank
    int reports = 0;
    uint64_t submitted = 0;  // order of the first report
    uint64_t complete = 0;   // order of the last report
    uint64_t predicted = 0;  // order of the prediction; 0: it was not predicted
    uint32_t announced = 0;  // chunks
    uint32_t done = 0;
  };

  Tensor& Find(int rank, const Report& report);
  bool Before(const Tensor& a, const Tensor& b) const;
  bool FollowsSurely(size_t bytes) const;
  const Tensor* HoldsUp(const Tensor& late) const;
  absl::Status NeverSubmitted(const Tensor& tensor, const std::string& consequence,
                              const std::vector<int>& silent) const;
  std::string WaitingFor(int rank, uint64_t except) const;

  const int world_;
  const Policy policy_;
  size_t window_bytes_;
  size_t unfinished_bytes_ = 0;
  size_t undrained_bytes_ = 0;  // of the last announced chunk, if it waits for a follower
  size_t largest_chunk_ = 0;
  uint64_t clock_ = 0;           // counts reports and predictions
  RecycledMap<Tensor> tensors_;  // by id
  std::vector<uint64_t> ready_;  // ids with chunks to announce, in no order
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_LEADER_H_
