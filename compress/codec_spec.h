// CodecSpec: a codec and its parameters. Both ends of a message must use equal specs.
#ifndef THINWIRE_COMPRESS_CODEC_SPEC_H_
#define THINWIRE_COMPRESS_CODEC_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/codec_list.h"
#include "compress/types.h"

namespace thinwire {

// Version of the bytes in compress/FORMAT.md. It is part of the handshake.
inline constexpr uint32_t kWireVersion = 2;

// The parameters of all codecs. Each codec's table (compress/codecs/) lists the ones it has, with
// their ranges; it ignores the others.
struct CodecSpec {
  CodecId id = codecs::Fp32::kTraits.id;
  uint32_t block = 256;  // elements that share one scale
  Rounding rounding = Rounding::kNearest;
  bool hadamard = false;         // full blocks of 256 go through a randomised transform
  uint64_t seed = 0;             // for stochastic rounding and the transform's signs
  uint32_t density_ppm = 10000;  // topk: entries per million elements
  uint32_t warmup = 0;           // topk: steps from a density of 1/4 down to density_ppm
  bool masking = true;           // topk with momentum: zero it where an entry is sent
  uint32_t sixteenths = 32;      // adaptive: bits per code, the mean of a shard, times 16
  uint32_t floor = 0;            // adaptive: least bits per code
  float threshold = 0.5f;        // ternary: the magnitude of the values sent

  // Parses "name" or "name:key=value,key=value". An unknown name or key, or a value out of range,
  // is InvalidArgument and names the nearest valid one.
  static absl::StatusOr<CodecSpec> Parse(std::string_view text);

  // The canonical form: Parse(ToString()) == *this; defaults are left out.
  std::string ToString() const;

  constexpr const CodecTraits& traits() const { return TraitsOf(id); }

  // The spec that step `step` (from 0) encodes with: topk's density has a warm-up.
  CodecSpec AtStep(uint64_t step) const;

  friend bool operator==(const CodecSpec&, const CodecSpec&) = default;
};

// How much a codec's accuracy depends on compressing the momentum in place of the gradient. The
// values equal those of tw_momentum_need.
enum class MomentumNeed : uint8_t {
  kUnused = 0,   // the bare gradient is as good
  kHelps = 1,    // the momentum is better
  kAdvised = 2,  // the bare gradient loses accuracy
  kRequired = 3  // the bare gradient diverges
};

// The codecs of both hops: "int4", "onebit:down=onebit", "int8:block=128,down=int4:block=128".
struct CodecPair {
  CodecSpec up;    // rank to owner
  CodecSpec down;  // owner to all ranks; entries have no second hop, and down == up

  // Like CodecSpec::Parse; "down=SPEC" comes last. Without it, onebit and ternary use int4 in the
  // second hop and every other codec uses itself.
  static absl::StatusOr<CodecPair> Parse(std::string_view text);
  std::string ToString() const;

  // True if the loss of one step is kept for the next one.
  bool uses_feedback() const;

  // The stronger need of the two.
  MomentumNeed momentum() const;

  // True if kernels/ runs both codecs on a device.
  bool has_kernels() const;

  // The codecs that a group of `size` ranks uses in place of these: int4 instead of entries that
  // would take more bytes than int4.
  CodecPair ForWorld(int size) const;

  friend bool operator==(const CodecPair&, const CodecPair&) = default;
};

// The codec that represents all values of the dtype exactly: bf16 for bf16, else fp32 (f16 has no
// codec of its own).
CodecSpec LosslessSpec(DType dtype);

// The most elements of a tensor, 256 GiB of fp32: a larger number is a caller's mistake, which
// would exhaust the process's memory.
inline constexpr size_t kMostElements = size_t{1} << 36;

// InvalidArgument if there are more.
absl::Status CheckElements(size_t numel);

// Exact size in bytes of an encoded shard of `numel` elements; 0 for none.
size_t EncodedBytes(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_SPEC_H_
