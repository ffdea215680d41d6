// InProcessWorld: what the ranks of one process share, namely blocks and frames that nobody has
// taken yet, and the failure of each rank. Thread-safe.
#ifndef THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_
#define THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/failure.h"
#include "transport/planes.h"
#include "transport/store.h"

namespace thinwire {

class InProcessWorld {
 public:
  InProcessWorld(int size, Failure::LostPeer lost_peer);

  void PutBlock(uint64_t tag, int from, int to, std::vector<uint8_t> block);
  // Waits for a block of that tag and size. Passing the deadline fails the rank `to`.
  absl::StatusOr<std::vector<uint8_t>> TakeBlock(uint64_t tag, size_t bytes, int from, int to,
                                                 Deadline deadline);

  absl::Status PutFrame(int from, int to, const ControlFrame& frame);
  absl::StatusOr<ControlMessage> TakeFrame(int to);

  // Fails the rank, which all its peers lose.
  void Leave(int rank);
  const std::shared_ptr<Failure>& failure(int rank) const { return failures_[rank]; }

 private:
  // A block waits under (tag, size, from, to) for its receiver.
  using Address = std::tuple<uint64_t, size_t, int, int>;

  std::vector<std::shared_ptr<Failure>> failures_;  // by rank
  absl::Mutex mu_;
  absl::CondVar changed_;  // a block or a frame came, or a rank failed
  std::map<Address, std::deque<std::vector<uint8_t>>> blocks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::deque<ControlMessage>> frames_ ABSL_GUARDED_BY(mu_);  // by rank
  std::vector<Failure::Listener> listeners_;                             // end first
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_IN_PROCESS_WORLD_H_
