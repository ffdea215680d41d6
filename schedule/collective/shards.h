// Shards: the parts of a chunk that ranks own: their elements, residuals, draws, and wire bytes.
#ifndef THINWIRE_SCHEDULE_COLLECTIVE_SHARDS_H_
#define THINWIRE_SCHEDULE_COLLECTIVE_SHARDS_H_

#include "schedule/collective/algorithm.h"
#include "schedule/hash.h"

namespace thinwire {

// True if the codec's wire bytes are the tensor's own bytes, without the padding.
inline bool IsVerbatim(const CodecSpec& spec, DType dtype) {
  return dtype == DType::kF32 && spec == LosslessSpec(dtype);
}

inline MutableBytes BytesOf(TensorView view) {
  return {static_cast<uint8_t*>(view.data), view.bytes()};
}

// The draws of stochastic rounding of elements from `first` on, counted within their codec. `hop`:
// of the second one 0, and of the first one the sender's rank + 1, so that ranks draw
// independently.
inline Draws DrawsOf(const ChunkJob& job, const CodecSpec& spec, int hop, size_t first) {
  return {.key = HashCombine(HashCombine(spec.seed, job.tensor), static_cast<uint64_t>(hop)),
          .stream = job.step,
          .first = first};
}

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COLLECTIVE_SHARDS_H_
