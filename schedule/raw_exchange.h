// The allreduce of a small tensor: everybody sends the raw values to everybody and sums them in
// rank order. One exchange instead of two, no leader, nothing lost.
#ifndef THINWIRE_SCHEDULE_RAW_EXCHANGE_H_
#define THINWIRE_SCHEDULE_RAW_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "compress/backend.h"
#include "schedule/lane_buffers.h"
#include "transport/transport.h"

namespace thinwire {

// Both ends post at once, in the constructor, so that ranks that come in other orders can't block
// one another. Backend, transport and buffers are of the host, or of one device's stream; they must
// outlive it. Not thread-safe.
class RawExchange {
 public:
  RawExchange(uint64_t tag, TensorView input, const Backend& backend, Transport& transport,
              LaneBuffers& buffers);

  // Waits for all peers, then writes scale * sum to `output` (which may be the input).
  absl::Status Finish(TensorView output, float scale, Deadline deadline);

 private:
  const TensorView input_;
  const CodecSpec codec_;  // whose wire bytes the raw values are
  const Backend& backend_;
  const int rank_;
  std::vector<const uint8_t*> incoming_;  // by rank; null at the own
  absl::Status status_;                   // of the buffers
  std::unique_ptr<Pending> pending_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_RAW_EXCHANGE_H_
