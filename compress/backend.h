// Backend: runs any codec on the host, or on one stream of a device, where calls return before the
// work is done. It never allocates (but where EncodeExtras says so, and in the scalar reference,
// which tests run, and processors that are too old), never fails and keeps no state; the caller has
// checked sizes, types and entries (schedule/ and integrations/c do). Thread-safe.
//
// Bytes and residuals are the same for every backend and instruction set: compress/FORMAT.md.
#ifndef THINWIRE_COMPRESS_BACKEND_H_
#define THINWIRE_COMPRESS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "absl/status/status.h"
#include "compress/codec_spec.h"
#include "compress/philox.h"
#include "compress/types.h"

namespace thinwire {

// Inputs that some codecs take besides; the others ignore them.
struct EncodeExtras {
  Draws draws;  // rounding=stochastic

  // topk: the magnitude of the last step's k-th entry, a first guess for this one, at most 2^127; 0
  // is none. Updated. It changes the time, never the result.
  float* threshold = nullptr;
  // topk: Backend::EntryScratchWords words to work in; empty: it allocates them, on the host.
  std::span<uint32_t> scratch;
  // topk with a residual: the local momentum u of DGC (Lin et al., arXiv 1712.01887, section 3.1,
  // momentum correction; 3.2, factor masking): u = beta * u + g, x = u + residual, and u = 0
  // where an entry is sent (unless spec.masking is off). With Nesterov x = g + beta * u + residual.
  // Without a velocity x = g + residual.
  Momentum momentum = {};
};

size_t TopKScratchWords(const CodecSpec& spec, size_t numel);  // of the host

// One of several shards that are encoded, or decoded, together.
struct EncodeArgs {
  TensorView gradient;
  float* residual = nullptr;
  uint8_t* wire = nullptr;
  EncodeExtras extras = {};
  // With a velocity, which is only read, the result of BeginMomentum is encoded in the gradient's
  // place. Not for topk, whose momentum is its own: EncodeExtras::momentum.
  Momentum momentum = {};
  float* room = nullptr;  // with a momentum: numel floats that a backend may work in
};

struct DecodeArgs {
  const uint8_t* wire = nullptr;
  TensorView out;
};

// One owner's work on its shard between the two exchanges: sum, mean, second-hop feedback, encode.
struct ReduceArgs {
  CodecSpec up;                           // codec of `wires`
  CodecSpec down;                         // codec of `wire_out`
  std::span<const uint8_t* const> wires;  // by rank, EncodedBytes(up, numel) each; null = own shard
  // The owner's gradient, which enters the sum unquantised. Where no wire is null only its dtype
  // and numel are read, and its data may be null: a reducer need not own a shard.
  TensorView own;
  float scale = 1.0f;             // 1/n for the mean, 1 for the sum
  float* residual = nullptr;      // numel floats of second-hop residual, updated; null = none
  TensorView out;                 // the decoded result; may be `own`
  uint8_t* wire_out = nullptr;    // EncodedBytes(down, numel); null = not wanted (fp32 only)
  Draws draws = {};               // of the encoding
  std::span<float> scratch = {};  // Backend::ReduceScratchFloats floats to work in
};

// Refuses bytes that no decoder may be given: of another length, or topk entries whose counts do
// not add up or whose indices do not ascend. InvalidArgument says which. All other bytes decode.
absl::Status CheckWire(const CodecSpec& spec, Bytes wire, size_t numel);

class Backend {
 public:
  virtual ~Backend() = default;

  // Encodes `gradient` into `wire` (EncodedBytes(spec, gradient.numel) bytes). With a residual
  // (gradient.numel floats) it encodes x = gradient + residual and leaves the loss x - D(x) there;
  // a block that is not finite leaves its residual as it was.
  virtual void Encode(const CodecSpec& spec, TensorView gradient, float* residual, uint8_t* wire,
                      const EncodeExtras& extras = {}) const = 0;

  // Decodes `wire` into `out`, rounding half-even to out.dtype.
  virtual void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const = 0;

  // Several shards, whose tensors have one dtype: on a device a single launch, momentum included.
  virtual void EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const;
  virtual void DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const {
    for (const DecodeArgs& shard : shards) Decode(spec, shard.wire, shard.out);
  }

  // sum[i] += D(wire)[i], in fp32.
  virtual void DecodeAdd(const CodecSpec& spec, const uint8_t* wire,
                         std::span<float> sum) const = 0;

  // topk only: sum[i] += factor * value of every entry, product and sum rounded one after the
  // other.
  virtual void AddEntries(const CodecSpec& spec, const uint8_t* wire, float factor,
                          std::span<float> sum) const = 0;

  // topk only: sum = the entries of all wires times `factor`, added in order to zeros, as
  // AddEntries adds them.
  virtual void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires,
                          float factor, std::span<float> sum) const {
    std::memset(static_cast<void*>(sum.data()), 0, sum.size_bytes());
    for (const uint8_t* wire : wires) AddEntries(spec, wire, factor, sum);
  }

  // topk only: words of EncodeExtras::scratch.
  virtual size_t EntryScratchWords(const CodecSpec& spec, size_t numel) const {
    return TopKScratchWords(spec, numel);
  }

  // CheckWire of a peer's shard, EncodedBytes(spec, numel) long, before it is decoded. A device
  // does not let the host wait for that: there it is always OK, what is malformed decodes to NaN,
  // and no access is out of bounds.
  virtual absl::Status CheckShard(const CodecSpec& spec, const uint8_t* wire, size_t numel) const {
    return CheckWire(spec, {wire, EncodedBytes(spec, numel)}, numel);
  }

  // sum = factor * sum + gradient, in fp32, product and sum rounded one after the other.
  virtual void Accumulate(TensorView gradient, float factor, std::span<float> sum) const = 0;

  // to[i] = from[i] where that is finite; elsewhere `to` stays as it was. They have one size and do
  // not overlap.
  virtual void CopyFinite(std::span<const float> from, std::span<float> to) const = 0;

  // Momentum that the engine owns: own = beta * velocity + gradient, rounded as in Accumulate. On a
  // device one pass, as the end is.
  virtual void BeginMomentum(TensorView gradient, float beta, std::span<const float> velocity,
                             std::span<float> own) const;
  // The end of a step, once an exchange has made the new `m`, which is used up: the velocity
  // becomes m where that is finite, and `out` m; with Nesterov g + beta * m, where g = m - beta *
  // the last velocity, and `spare` has as many floats as m, of any content.
  virtual void EndMomentum(const Momentum& momentum, std::span<float> m, std::span<float> spare,
                           TensorView out) const;

  // True if all of them are zero. `*known` remembers that they are, which spares the reading: it is
  // zero again whenever they may have changed. Null: nothing is known. False where looking would
  // cost more than it may save: on a device.
  virtual bool AreZero(std::span<const std::span<const float>> parts, float* known) const;

  // y = scale * (sum over ranks in rank order) + residual; encodes y, keeps y - D(y), decodes D(y)
  // into `out`. The sum starts as the first rank's value, in fp32.
  virtual void Reduce(const ReduceArgs& args) const = 0;

  // Floats of ReduceArgs::scratch, for so many wires of `numel` elements each: a sum over more
  // wires than a launch on a device takes is kept there in between.
  virtual size_t ReduceScratchFloats(size_t /*wires*/, size_t /*numel*/) const { return 0; }

  // On a device the two must not overlap, unless they are the same.
  virtual void Copy(void* to, const void* from, size_t bytes) const {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  }
};

// The fastest instruction set that this CPU has, chosen at run time.
const Backend& CpuBackend();

// The normative scalar reference.
const Backend& ScalarBackend();

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_BACKEND_H_
