// The allreduce of one chunk: a compressed reduce-scatter, then a compressed all-gather.
// Every rank owns one shard of the chunk and reduces it; both hops carry wire bytes.
#ifndef THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_
#define THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "compress/backend.h"
#include "schedule/plan.h"
#include "schedule/stage_clock.h"
#include "transport/transport.h"

namespace thinwire {

struct ChunkJob {
  uint64_t tag = 0;  // equal on all ranks, never used twice
  CodecSpec codec;   // of both hops
  const Chunk* chunk = nullptr;
  TensorView input, output;   // the whole bucket; may be the same memory
  float* residual = nullptr;  // the whole bucket, as ErrorFeedback::Bind lays it out; null = none
  float scale = 1.0f;         // 1/n for the mean, 1 for the sum
  Deadline deadline;
};

// A lane's memory; it grows to the largest chunk seen and is then reused.

class LaneBuffers {
 public:
  // Forgets what was handed out and makes room for `bytes`.
  void Reset(size_t bytes);
  // The next `bytes` of it, aligned to a cache line.
  MutableBytes Take(size_t bytes);
  static size_t Rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  std::vector<uint8_t> memory_;
  size_t used_ = 0;
};

// An error is the transport's. The residuals of the chunk are then those of a step half done.
absl::Status AllReduceChunk(const ChunkJob& job, const Backend& backend, Transport& transport,
                            LaneBuffers& buffers, StageClock& clock);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_
