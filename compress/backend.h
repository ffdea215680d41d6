// Backend: runs any codec on one device. It never allocates, never fails and keeps no state (the
// scalar reference, which only tests run, allocates); the caller has checked sizes and types
// (schedule/ and integrations/c do). Thread-safe.
//
// Bytes and residuals are the same for every backend and instruction set: compress/FORMAT.md.
#ifndef THINWIRE_COMPRESS_BACKEND_H_
#define THINWIRE_COMPRESS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "compress/codec_spec.h"
#include "compress/types.h"

namespace thinwire {

// One owner's work on its shard between the two exchanges: sum, mean, second-hop feedback, encode.
struct ReduceArgs {
  CodecSpec up;                           // codec of `wires`
  CodecSpec down;                         // codec of `wire_out`
  std::span<const uint8_t* const> wires;  // by rank, EncodedBytes(up, numel) each; null = own shard
  TensorView own;                         // the owner's gradient, which enters the sum unquantised
  float scale = 1.0f;                     // 1/n for the mean, 1 for the sum
  float* residual = nullptr;    // numel floats of second-hop residual, updated; null = none
  TensorView out;               // the decoded result; may be `own`
  uint8_t* wire_out = nullptr;  // EncodedBytes(down, numel); null = not wanted (fp32 only)
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Encodes `gradient` into `wire` (EncodedBytes(spec, gradient.numel) bytes). With a residual
  // (gradient.numel floats) it encodes x = gradient + residual and leaves the loss x - D(x) there;
  // a block that is not finite leaves its residual as it was.
  virtual void Encode(const CodecSpec& spec, TensorView gradient, float* residual,
                      uint8_t* wire) const = 0;

  // Decodes `wire` into `out`, rounding half-even to out.dtype.
  virtual void Decode(const CodecSpec& spec, const uint8_t* wire, TensorView out) const = 0;

  // sum[i] += D(wire)[i], in fp32.
  virtual void DecodeAdd(const CodecSpec& spec, const uint8_t* wire,
                         std::span<float> sum) const = 0;

  // y = scale * (sum over ranks in rank order) + residual; encodes y, keeps y - D(y), decodes D(y)
  // into `out`. The sum starts as the first rank's value, in fp32.
  virtual void Reduce(const ReduceArgs& args) const = 0;
};

// The fastest instruction set that this CPU has, chosen at run time.
const Backend& CpuBackend();

// The normative scalar reference.
const Backend& ScalarBackend();

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_BACKEND_H_
