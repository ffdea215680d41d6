// InProcessWorld: what the ranks of one process share, namely blocks and frames that nobody has
// taken yet, and the failure of each rank. Thread-safe.
#ifndef THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_
#define THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/control_plane.h"
#include "transport/store.h"

namespace thinwire {

class InProcessWorld {
 public:
  explicit InProcessWorld(int size) : ranks_(size) {}

  void PutBlock(uint64_t tag, int from, int to, std::vector<uint8_t> block);
  // Waits for a block of that tag and size. Passing the deadline fails the rank `to`.
  absl::StatusOr<std::vector<uint8_t>> TakeBlock(uint64_t tag, size_t bytes, int from, int to,
                                                 Deadline deadline);

  absl::Status PutFrame(int from, int to, const ControlFrame& frame);
  absl::StatusOr<ControlMessage> TakeFrame(int to);

  // The first failure of a rank stays.
  void Fail(int rank, const absl::Status& reason);
  // Fails the rank, and all its peers because it is gone.
  void Leave(int rank);
  absl::Status failure(int rank) const;

 private:
  // A block waits under (tag, size, from, to) for its receiver.
  using Address = std::tuple<uint64_t, size_t, int, int>;
  struct Rank {
    absl::Status failure;
    std::deque<ControlMessage> frames;
  };

  void FailLocked(int rank, const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  absl::CondVar changed_;  // a block or a frame came, or a rank failed
  std::map<Address, std::deque<std::vector<uint8_t>>> blocks_ ABSL_GUARDED_BY(mu_);
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_
