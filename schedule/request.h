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
// kAllToAll: N elements in, N out: part r, of N/n, goes to rank r, and comes from it in its place.
// n must divide N. It copies, whatever the codec; the op is ignored. Input and output are not the
// same memory.
enum class Collective : uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kAllToAll = 3
};

// True if it makes a sum or mean.
constexpr bool Reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

// The output's elements of a collective whose input has `numel`.
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
  int priority = 0;  // lower goes first, where the policy looks at it
  // The parameters that the elements belong to, and the codec that each goes with. Empty: the key
  // itself is the only parameter, and goes with the first codec. All collectives but
  // the allreduce have one codec.
  std::span<const Segment> segments = {};
  // In words of the caller's, such as "10x100". Ranks whose words differ fail with a mismatch.
  std::string_view shape = {};
};

// One use of a bucket. Memory must live until the work is done.
struct Submission {
  TensorView input;
  TensorView output;  // may be the input of an allreduce
  // Numbers of segments that this rank has no gradient for; their elements must be zeros, and count
  // as zeros. Residuals of them stay here: sent now, they would be lost where nobody uses the mean.
  std::span<const uint32_t> absent = {};
  // The caller is about to wait for this very call: a small tensor is then exchanged on its thread.
  bool caller_waits = false;
  // On a device: the stream (a cudaStream_t; null: the default one) whose work so far makes the
  // input, and whose later work may use the output once Use::Wait has returned.
  void* stream = nullptr;
  // Replaces the number of ranks in this use's mean, so that ranks can have weights (each
  // multiplies its input by its weight, and all divide by the sum of weights) or members that send
  // zeros do not count. Equal on all ranks, which is compared; finite and above 0. 0: the number of
  // ranks. Not with momentum, whose own part is a mean over all ranks.
  float divisor = 0.0f;
};

// A bucket and its use in one; the engine registers the bucket under its key if it is new.
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
