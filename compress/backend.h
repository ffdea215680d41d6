// Backend: runs any codec on the host, or on one stream of a device, where calls return before the
// work is done. It never fails and has no state; the caller must have checked sizes, types and
// entries (schedule/ and integrations/c do). Thread-safe.
//
// Calls take no scratch memory from their caller (except ReduceArgs::scratch). A device backend
// uses the room that it was given (DeviceStream::BackendIn); without one, or if it is too small, it
// allocates from a pool in the stream's order. On the host scratch is on the stack, except that
// topk keeps its candidates in memory of the thread, for the thread's next call. The scalar
// reference, which tests and CPUs without SIMD run, allocates.
//
// Bytes and residuals are the same for every backend and instruction set: compress/FORMAT.md.
#ifndef THINWIRE_COMPRESS_BACKEND_H_
#define THINWIRE_COMPRESS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "compress/codec_spec.h"
#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

// One of several shards that are encoded together.
struct EncodeArgs {
  TensorView gradient;
  float* residual = nullptr;  // a float for each element; null: none
  uint8_t* wire = nullptr;    // EncodedBytes(spec, gradient.numel)
  Draws draws = {};           // rounding=stochastic
  // Entries only. The magnitude of the last step's k-th entry, a first guess for this one, at most
  // 2^127; 0 if there is none. Updated. It affects only the time, never the result. Null: not kept.
  float* threshold = nullptr;
  // With a velocity, beta * velocity + gradient is encoded in the gradient's place, rounded as by
  // Accumulate; the velocity is only read. But a codec of entries with a residual keeps the local
  // momentum u of DGC here (Lin et al., arXiv 1712.01887, section 3.1, momentum correction; 3.2,
  // factor masking): u = beta * u + g, x = u + residual, and u = 0 where an entry is sent (unless
  // spec.masking is off). With Nesterov x = g + beta * u + residual. Without a velocity x = g +
  // residual.
  Momentum momentum = {};
};

struct DecodeArgs {
  const uint8_t* wire = nullptr;
  TensorView out;
};

// One owner's work on its shard between the two exchanges: sum, mean, second-hop feedback, encode.
struct ReduceArgs {
  CodecSpec up;                           // codec of `wires`
  CodecSpec down;                         // codec of `wire_out`
  std::span<const uint8_t* const> wires;  // by rank, EncodedBytes(up, numel) each; null: own shard
  // The owner's gradient, which enters the sum unquantised. If no wire is null only its dtype and
  // numel are read, and its data may be null: a reducer need not own a shard.
  TensorView own;
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum
  float* residual = nullptr;      // numel floats of second-hop residual, updated; null = none
  TensorView out;                 // the decoded result; may be `own`
  uint8_t* wire_out = nullptr;    // EncodedBytes(down, numel); null: not needed (fp32 only)
  Draws draws = {};               // for encoding
  std::span<float> scratch = {};  // Backend::ReduceScratchFloats floats of scratch
};

// Rejects bytes that must not be passed to a decoder: bytes of the wrong length, or topk entries
// whose counts do not add up or whose indices do not ascend. InvalidArgument names the defect. All
// other bytes decode.
absl::Status CheckWire(const CodecSpec& spec, Bytes wire, size_t numel);

class Backend {
 public:
  virtual ~Backend() = default;

  // Encodes each `gradient` into its `wire`. With a residual it encodes x = gradient + residual and
  // stores the loss x - D(x) there; a block that is not finite leaves its residual unchanged. All
  // tensors must have one dtype, so that a device needs a single launch, momentum included.
  virtual void EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const = 0;

  // Decodes each `wire` into its `out`, rounding half-even to out.dtype.
  virtual void DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const = 0;

  // sum[i] += D(wire)[i], in fp32.
  virtual void DecodeAdd(const CodecSpec& spec, const uint8_t* wire,
                         std::span<float> sum) const = 0;

  // y = scale * (sum over ranks in rank order) + residual; encodes y, keeps y - D(y), decodes D(y)
  // into `out`. The sum starts as the first rank's value, in fp32.
  virtual void Reduce(const ReduceArgs& args) const = 0;

  // Floats of ReduceArgs::scratch for `wires` wires of `numel` elements each: if there are more
  // wires than one launch on a device takes, the partial sum is kept there.
  virtual size_t ReduceScratchFloats(size_t /*wires*/, size_t /*numel*/) const { return 0; }

  // One shard.
  void Encode(const CodecSpec& spec, const EncodeArgs& shard) const {
    EncodeAll(spec, {&shard, 1});
  }
  void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
              const Draws& draws = {}) const {
    Encode(spec, {gradient, residual, wire, draws});
  }
  void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const {
    const DecodeArgs shard{wire, out};
    DecodeAll(spec, {&shard, 1});
  }

  // Passes over fp32 and tensors that belong to no codec: copies, sums, momentum.

  // On a device the two must not overlap, unless they are the same.
  virtual void Copy(void* to, const void* from, size_t bytes) const {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  }

  // to[i] = from[i] where that is finite; elsewhere `to` is unchanged. They have one size and do
  // not overlap.
  virtual void CopyFinite(std::span<const float> from, std::span<float> to) const = 0;

  // sum = factor * base + gradient, in fp32, product and sum rounded one after the other. `base`
  // and `sum` may be the same memory; all have one size.
  virtual void Accumulate(TensorView gradient, float factor, std::span<const float> base,
                          std::span<float> sum) const = 0;

  // Ends a step of momentum after an exchange has computed the new `m`, whose content is lost: the
  // velocity becomes m where that is finite, and `out` m; with Nesterov g + beta * m, where g = m -
  // beta * the last velocity. The step began with Accumulate(gradient, beta, velocity, m_own).
  virtual void EndMomentum(const Momentum& momentum, std::span<float> m, TensorView out) const = 0;

  // True if all floats are zero. `*known` is then set to 1, so that the next call need not read
  // them; the caller must reset it to 0 whenever they may have changed. Null: nothing is known.
  // Always false on a device, where reading would cost more than it may save.
  virtual bool AreZero(std::span<const std::span<const float>> parts, float* known) const;

  // The functions below are for codecs of entries only.

  // sum = the entries of all wires times `factor`, added in order to zeros, product and sum rounded
  // one after the other.
  virtual void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires,
                          float factor, std::span<float> sum) const = 0;

  // CheckWire of a peer's shard, EncodedBytes(spec, numel) long, before it is decoded. On a device
  // the host can't wait for that: there it always returns OK, malformed entries decode to NaN, and
  // no access is out of bounds.
  virtual absl::Status CheckShard(const CodecSpec& spec, const uint8_t* wire, size_t numel) const {
    return CheckWire(spec, {wire, EncodedBytes(spec, numel)}, numel);
  }
};

// Uses the best instruction set of this CPU, chosen at run time.
const Backend& CpuBackend();

// The normative scalar reference.
const Backend& ScalarBackend();

// False on a CPU older than any target (x86-64 without SSE4.2 and AES): there the scalar code runs.
bool SimdAvailable();

const char* SimdTargetName();  // "AVX3", "AVX2", ...

// For tests and benchmarks: all targets that this build has and this CPU can run, best first, and a
// way to choose one. Not thread-safe; call them when no codec runs.
std::vector<std::string> SimdTargets();
void ForceSimdTarget(const std::string& name);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_BACKEND_H_
