// NcclObserver: counts a program's reductions, and says what compression would send in their place.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_OBSERVER_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_OBSERVER_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "compress/types.h"
#include "integrations/nccl_shim/nccl_call.h"

namespace thinwire {

// Thread-safe.
class NcclObserver {
 public:
  // Nodes have that many ranks, which are neighbours.
  explicit NcclObserver(int local_size) : local_size_(local_size) {}

  // A call on a communicator of `ranks` ranks; `way` is how it goes.
  void Count(const NcclCall& call, int ranks, NcclWay way);

  // Lines of text; empty if nothing was counted.
  std::string Report() const;

 private:
  struct Tally {
    uint64_t calls = 0;
    double bytes = 0;
  };
  // The bytes that a node sends to others for the calls that can go compressed, or do.
  struct Sent {
    double ring = 0, int8 = 0, int4 = 0;
  };
  using Row = std::pair<DType, size_t>;  // and the number of the size class

  const int local_size_;
  mutable absl::Mutex mu_;
  std::chrono::steady_clock::time_point first_ ABSL_GUARDED_BY(mu_){};
  std::chrono::steady_clock::time_point last_ ABSL_GUARDED_BY(mu_){};
  std::map<Row, Tally> rows_ ABSL_GUARDED_BY(mu_);  // of sums and means of known elements
  Sent sent_ ABSL_GUARDED_BY(mu_);
  std::map<NcclWay, uint64_t> ways_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_OBSERVER_H_
