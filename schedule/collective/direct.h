// Direct: which allreduces are exchanged at once, in one hop, outside the order of chunks. In place
// of an announcement and two hops they cost one latency, and (n - 1) times their wire bytes.
//
// A pure function of the tensor, the world and the options, so that all ranks agree without a word.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_DIRECT_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_DIRECT_H_

#include <cstddef>
#include <span>

#include "schedule/collective/algorithm.h"

namespace thinwire {

// True if an allreduce of that many raw bytes goes uncompressed.
bool GoesRaw(size_t bytes, int world, const Options& options);

struct DirectExchange {
  const Algorithm* algorithm = nullptr;  // of one hop; null: the tensor goes in chunks
  size_t bytes = 0;                      // that a rank sends, to all its peers together
};

// The direct exchange of an allreduce of the segments, of which there is at least one.
DirectExchange DirectExchangeOf(std::span<const Segment> segments, DType dtype, int world,
                                const Options& options);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_DIRECT_H_
