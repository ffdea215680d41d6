// Leader: rank 0's book of which rank has which tensor ready, and the order that it makes of it.
//
// Collectives deadlock when ranks choose by what is ready locally. So among the chunks that *all*
// ranks have reported the leader takes the first by policy, and all ranks start chunks in that
// order. Pure logic: no threads, no clock, no transport. Not thread-safe.
#ifndef THINWIRE_SCHEDULE_LEADER_H_
#define THINWIRE_SCHEDULE_LEADER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "schedule/options.h"
#include "schedule/protocol.h"

namespace thinwire {

class Leader {
 public:
  // At most `window_bytes` of fp32 input are announced and unfinished (but always one chunk).
  Leader(int world, Policy policy, size_t window_bytes);

  // FailedPrecondition when `rank` describes the tensor otherwise than an earlier rank did. A
  // repeated report of one rank changes nothing.
  absl::Status OnReport(int rank, const Report& report);

  void SetWindow(size_t bytes) { window_bytes_ = bytes; }

  // The tensor will come, and its chunks are announced already.
  void Expect(const Report& report);
  // Whether all ranks have reported it.
  bool AllHave(uint64_t id) const;

  // The chunks to announce now, in order. They count as announced.
  std::vector<Announcement> Next();

  // A chunk is finished on the leader's own rank, which frees its part of the window.
  void OnChunkDone(uint64_t id);
  // A raw tensor is finished; nothing more is to be known of it.
  void Forget(uint64_t id) { tensors_.erase(id); }

  // `rank` has waited for the tensor past its deadline.
  void OnOverdue(int rank, const Report& report);
  // Why that is: which rank never submitted it, or fell silent. Always an error.
  absl::Status Diagnose(uint64_t id) const;

 private:
  struct Tensor {
    Report first;  // as the first rank reported it
    int first_rank = 0;
    std::vector<bool> reported;  // by rank
    std::vector<bool> overdue;
    int reports = 0;
    uint64_t submitted = 0;  // order of the first report
    uint64_t complete = 0;   // order of the last report
    uint32_t announced = 0;  // chunks
    uint32_t done = 0;
    bool planned = false;  // outside the window
  };

  Tensor& Find(int rank, const Report& report);
  bool Before(const Tensor& a, const Tensor& b) const;
  std::string WaitingFor(int rank, uint64_t except) const;

  const int world_;
  const Policy policy_;
  size_t window_bytes_;
  size_t unfinished_bytes_ = 0;
  uint64_t clock_ = 0;                  // counts reports
  std::map<uint64_t, Tensor> tensors_;  // by id
  std::vector<uint64_t> ready_;         // ids with chunks to announce, in no order
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_LEADER_H_
