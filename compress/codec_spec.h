// CodecSpec: which codec, with which parameters. Both ends of a message must hold equal specs.
#ifndef THINWIRE_COMPRESS_CODEC_SPEC_H_
#define THINWIRE_COMPRESS_CODEC_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "compress/codec_id.h"

namespace thinwire {

// Version of the bytes in compress/FORMAT.md. It is part of the handshake.
inline constexpr uint32_t kWireVersion = 2;

// What a parameter means, and which codecs have it, is in codec_list.h; the others ignore it.
struct CodecSpec {
  CodecId id = CodecId::kFp32;
  uint32_t block = 256;  // elements that share one scale
  Rounding rounding = Rounding::kNearest;
  bool hadamard = false;         // full blocks of 256 go through a randomised transform
  uint64_t seed = 0;             // of stochastic rounding and of the transform's signs
  uint32_t density_ppm = 10000;  // topk: entries in a million elements
  uint32_t warmup = 0;           // topk: steps from a density of 1/4 down to density_ppm
  bool masking = true;           // topk with momentum: it is zeroed where an entry is sent

  // Parses "name" or "name:key=value,key=value". An unknown name or key, or a value out of range,
  // is InvalidArgument and names the nearest valid one.
  static absl::StatusOr<CodecSpec> Parse(std::string_view text);

  // The canonical form: Parse(ToString()) == *this; defaults are left out.
  std::string ToString() const;

  // What step `step` (from 0) encodes with: the density of the warm-up, then the spec itself.
  // DGC's schedule, Lin et al., arXiv 1712.01887, section 3.3: a quarter each time.
  CodecSpec AtStep(uint64_t step) const;

  friend bool operator==(const CodecSpec&, const CodecSpec&) = default;
};

// The codecs of both hops: "int4", "onebit:down=onebit", "int8:block=128,down=int4:block=128".
struct CodecPair {
  CodecSpec up;    // rank to owner
  CodecSpec down;  // owner to everybody; topk has no second hop, and down == up there

  // As CodecSpec::Parse; "down=SPEC" comes last. Without it, onebit goes down as int4 and every
  // other codec as itself.
  static absl::StatusOr<CodecPair> Parse(std::string_view text);
  std::string ToString() const;

  // True if what one step loses is kept for the next one.
  bool uses_feedback() const;

  friend bool operator==(const CodecPair&, const CodecPair&) = default;
};

// Exact size in bytes of an encoded shard of `numel` elements; 0 for none.
size_t EncodedBytes(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_SPEC_H_
