// WeightedMean combines the updates that members of training between sites have sent, and computes
// the norms and products by which they are judged, in one pass through a core's cache.
#ifndef THINWIRE_COMPRESS_WEIGHTED_MEAN_H_
#define THINWIRE_COMPRESS_WEIGHTED_MEAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "compress/codec_spec.h"

namespace thinwire {

// Accumulators (doubles) for inner products: lane l takes elements l, l + 16, ... of each
// kProductPiece elements, and lanes are folded by halves. Products of floats are exact in a double,
// so every instruction set gives the same bits.
inline constexpr size_t kProductLanes = 16;
inline constexpr size_t kProductPiece = 4096;

struct WeightedMeanArgs {
  CodecSpec spec;
  // By member: shards of mean.size() elements, one after another. All but the last have `shard`
  // elements.
  std::span<const uint8_t* const> wires;
  std::span<const float> factors;  // by member
  size_t shard;
  std::span<float> mean;
  // The function adds to these: the product of each member's values with themselves, of each
  // member's with the mean, and of the mean with itself. 2 * members + 1 in all.
  std::span<double> products;
};

// The bytes of `numel` elements as such shards.
size_t ShardsBytes(const CodecSpec& spec, size_t numel, size_t shard);

// mean = factors[0] * values of member 0 + factors[1] * those of member 1 ..., every product and
// every sum rounded to fp32, in this order. At least one member and one element. InvalidArgument
// for a malformed shard (CheckWire); the mean is then undefined. Allocates a shard's floats for
// each member.
absl::Status WeightedMean(const WeightedMeanArgs& args);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_WEIGHTED_MEAN_H_
