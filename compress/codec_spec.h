// CodecSpec: which codec, with which parameters. Both ends of a message must hold equal specs.
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

// The parameters of all codecs. Each codec's table (compress/codecs/) says which it has, and with
// which range; it ignores the others.
struct CodecSpec {
  CodecId id = codecs::Fp32::kTraits.id;
  uint32_t block = 256;  // elements that share one scale
  Rounding rounding = Rounding::kNearest;
  bool hadamard = false;         // full blocks of 256 go through a randomised transform
  uint64_t seed = 0;             // of stochastic rounding and of the transform's signs
  uint32_t density_ppm = 10000;  // topk: entries in a million elements
  uint32_t warmup = 0;           // topk: steps from a density of 1/4 down to density_ppm
  bool masking = true;           // topk with momentum: it is zeroed where an entry is sent
  uint32_t sixteenths = 32;      // adaptive: bits of a code, the mean of a shard, times 16
  uint32_t floor = 0;            // adaptive: bits of a code, at least
  float threshold = 0.5f;        // ternary: the magnitude of what is sent

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
// values are those of tw_momentum_need.
enum class MomentumNeed : uint8_t {
  kUnused = 0,   // the bare gradient does as well
  kHelps = 1,    // the momentum does better
  kAdvised = 2,  // the bare gradient loses accuracy
  kRequired = 3  // the bare gradient diverges
};

// The codecs of both hops: "int4", "onebit:down=onebit", "int8:block=128,down=int4:block=128".
struct CodecPair {
  CodecSpec up;    // rank to owner
  CodecSpec down;  // owner to everybody; entries have no second hop, and down == up there

  // As CodecSpec::Parse; "down=SPEC" comes last. Without it, onebit and ternary go down as int4
  // and every other codec as itself.
  static absl::StatusOr<CodecPair> Parse(std::string_view text);
  std::string ToString() const;

  // True if what one step loses is kept for the next one.
  bool uses_feedback() const;

  // The stronger need of the two.
  MomentumNeed momentum() const;

  // True if kernels/ runs both on a device.
  bool has_kernels() const;

  // The codecs that a group of `size` ranks takes in place of these: int4 for entries that would be
  // more bytes than it.
  CodecPair ForWorld(int size) const;

  friend bool operator==(const CodecPair&, const CodecPair&) = default;
};

// The codec whose values are those of the tensor: bf16 of bf16, else fp32 (f16 has none of its
// own).
CodecSpec LosslessSpec(DType dtype);

// The most elements of a tensor, 256 GiB of fp32: more is a caller's mistake, which would end in a
// process without memory.
inline constexpr size_t kMostElements = size_t{1} << 36;

// InvalidArgument if there are more.
absl::Status CheckElements(size_t numel);

// Exact size in bytes of an encoded shard of `numel` elements; 0 for none.
size_t EncodedBytes(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_SPEC_H_
