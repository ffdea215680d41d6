// The allreduce of one chunk. Dense codecs: a compressed reduce-scatter, then a compressed
// all-gather; every rank owns one shard of the chunk and reduces it; both hops carry wire bytes.
// topk: an all-gather of everybody's entries, which everybody sums in rank order.
#ifndef THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_
#define THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "compress/backend.h"
#include "schedule/lane_buffers.h"
#include "schedule/momentum.h"
#include "schedule/plan.h"
#include "schedule/stage_clock.h"
#include "transport/transport.h"

namespace thinwire {

struct ChunkJob {
  uint64_t tag = 0;  // equal on all ranks, never used twice
  CodecPair codec;
  const Chunk* chunk = nullptr;
  TensorView input, output;  // the whole bucket; may be the same memory
  // Of the whole bucket in the plan's order, as ErrorFeedback::Bind lays them out; null = none.
  float* residual = nullptr;
  float* velocity = nullptr;  // dense: the global momentum; topk: the local one
  MomentumOptions momentum;
  std::span<const Range> absent;  // of the bucket in the plan's order: schedule/absence.h
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum
  uint32_t* threshold = nullptr;  // topk: carried from step to step
  uint64_t tensor = 0;            // what stochastic rounding knows the tensor by
  uint64_t step = 0;
  Deadline deadline;
};

// All of backend, transport and buffers are of the host, or all of one device's stream; then the
// output is there for later work of the stream. topk is the host's alone.
// The transport's error, that of a device without memory, or FailedPrecondition if a peer's entries
// are no topk shard. The residuals and the momentum of the chunk are then those of a step half
// done.
absl::Status AllReduceChunk(const ChunkJob& job, const Backend& backend, Transport& transport,
                            LaneBuffers& buffers, StageClock& clock);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_CHUNK_ALLREDUCE_H_
