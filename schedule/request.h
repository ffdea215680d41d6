// Requests that callers make of an engine: buckets, and collectives on them.
#ifndef THINWIRE_SCHEDULE_REQUEST_H_
#define THINWIRE_SCHEDULE_REQUEST_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "compress/error_feedback.h"
#include "compress/types.h"

namespace thinwire {

enum class Op : uint8_t { kMean = 0, kSum = 1 };

// With n ranks and a bucket of N elements:
// kAllReduce: N elements in, the N elements of the mean or sum out.
// kReduceScatter: N elements in, the rank's own N/n of the mean or sum out; n must divide N.
// kAllGather: N elements in, n * N out: the ranks' elements in rank order. The op is ignored.
// kAllToAll: N elements in, N out: part r, of N/n elements, goes to rank r, and is replaced by the
// part from rank r. n must divide N. Copies uncompressed, whatever the codec; the op is ignored.
// Input and output must not overlap.
enum class Collective : uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kAllToAll = 3
};

// True if the collective computes a sum or mean.
constexpr bool Reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

// Elements of the output of a collective whose input has `numel`.
constexpr size_t OutputNumel(Collective collective, size_t numel, int size) {
  if (collective == Collective::kReduceScatter) return numel / size;
  return collective == Collective::kAllGather ? numel * size : numel;
}

// A bucket is described once, and submitted any number of times.
struct BucketRequest {
  // Equal on all ranks. Empty: calls are matched by their order, and there is no error feedback.
  std::string_view key = {};
  size_t numel = 0;  // of the input
  DType dtype = DType::kF32;
  Op op = Op::kMean;
  Collective collective = Collective::kAllReduce;
  int priority = 0;  // lower goes first, with Policy::kP3
  // The parameters that the elements belong to, with the codec of each. Empty: the key itself is
  // the only parameter, with the first codec. All collectives but the allreduce use a single codec.
  std::span<const Segment> segments = {};
  // Any text, such as "10x100". Ranks with different texts fail with a mismatch.
  std::string_view shape = {};
};

// One use of a bucket. Memory must live until the work is done.
struct Submission {
  TensorView input;
  TensorView output;  // may be the input, in an allreduce
  // Indices of the segments that this rank has no gradient for; their elements must be zeros, and
  // count as zeros. Their residuals are kept: sent now, they would be lost if no rank uses the
  // mean.
  std::span<const uint32_t> absent = {};
  // The caller is about to wait for this call: a small tensor is then exchanged on its thread.
  bool caller_waits = false;
  // On a device: the stream (a cudaStream_t; null: the default stream) whose work so far produces
  // the input, and whose later work may use the output once Use::Wait has returned.
  void* stream = nullptr;
  // Replaces the number of ranks in this use's mean, so that ranks can have weights (each
  // multiplies its input by its weight, and all divide by the sum of weights) or members that send
  // zeros do not count. Must be equal on all ranks (which is checked), finite and above 0. 0: the
  // number of ranks. Not allowed with momentum, whose own part is a mean over all ranks.
  float divisor = 0.0f;
};

// A bucket and a use of it in one; the engine registers the bucket under its key if it is new.
struct CollectiveRequest {
  TensorView input;
  TensorView output;
  std::string_view key = {};
  std::span<const Segment> segments = {};
  std::span<const uint32_t> absent = {};
  int priority = 0;
  Op op = Op::kMean;
  bool caller_waits = false;
  void* stream = nullptr;
  Collective collective = Collective::kAllReduce;
  float divisor = 0.0f;

  BucketRequest bucket() const {
    return {key, input.numel, input.dtype, op, collective, priority, segments, {}};
  }
  Submission submission() const { return {input, output, absent, caller_waits, stream, divisor}; }
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_REQUEST_H_
