// CodecInfo: all that the host knows of a codec: its parameters, its operations on each backend,
// and the few decisions that differ by codec. Each codec's .cc in compress/codecs/ has one.
#ifndef THINWIRE_COMPRESS_CODEC_INFO_H_
#define THINWIRE_COMPRESS_CODEC_INFO_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "compress/codec_spec.h"
#include "compress/types.h"

namespace thinwire {

struct EntryArgs;
struct Piece;
struct Shard;
struct Walk;
namespace simd {
struct Reduction;
}  // namespace simd

// A parameter of a spec. CodecSpec{} holds the defaults.
struct ParameterInfo {
  const char* key;
  const char* range;  // completes "expected ..."
  const char* help;   // one sentence, without the range
  // Sets the field of the spec; or leaves it and returns the nearest valid value, as text.
  std::optional<std::string> (*parse)(const std::string& value, CodecSpec* spec);
  std::string (*print)(const CodecSpec& spec);
};

// Operations of codecs of elements and of blocks, on pieces of fp32 that begin on a block border.
// `g`, `r`, `out` and `sum` are the piece's own, at any alignment; `wire` is the whole shard's.
struct DenseOperations {
  // As Backend::EncodeAll of one shard; writes the piece's scales and codes, and not the padding.
  // `r` may be null.
  void (*encode)(const Piece& piece, const float* g, float* r, uint8_t* wire) = nullptr;
  void (*decode)(const Piece& piece, const uint8_t* wire, float* out) = nullptr;
  void (*decode_add)(const Piece& piece, const uint8_t* wire, float* sum) = nullptr;
  // kWidths only. `heads` writes a piece's scales, and adds g to r where blocks are finite. When
  // all pieces' are written, a walk begins over them, and `encode` takes it from the first piece to
  // the last: where r is not null x stands there, and g is not read. Decoding begins with a walk
  // too.
  void (*heads)(const Piece& piece, const float* g, float* r, uint8_t* wire) = nullptr;
  void (*begin)(const Shard& shard, const uint8_t* wire, Walk* walk) = nullptr;
  // kWidths only. As `encode` of x in r, and then `decode` of it: a loss takes most of a decoding.
  void (*encode_and_decode)(const Piece& piece, float* r, uint8_t* wire, float* out) = nullptr;
  // Backend::Reduce in one pass over the beginning of a piece, both codecs' pieces being of the
  // same elements; returns how many elements it did, 0 where it has no loop for `down`. `wires` are
  // whole shards, all else is the piece's own; no `codes`: the encoding is not wanted.
  // Default: the other operations do it, one rank after the other.
  size_t (*reduce)(const Piece& up, const Piece& down, const simd::Reduction& args) = nullptr;
};

// Operations of codecs of entries, on whole shards.
struct EntryOperations {
  // As Backend::EncodeEntries of at least one element; the padding is zero already.
  void (*encode)(const CodecSpec& spec, const EntryArgs& args) = nullptr;
  void (*decode)(const CodecSpec& spec, const uint8_t* wire, const TensorView& out) = nullptr;
  // sum[i] += factor * value of every entry, product and sum rounded one after the other.
  void (*add)(const CodecSpec& spec, const uint8_t* wire, float factor,
              std::span<float> sum) = nullptr;
};

// One of the two is null, by the codec's kind.
struct CodecOperations {
  DenseOperations dense;
  EntryOperations entries;
};

struct CodecInfo {
  const CodecTraits& traits;
  const char* help;                                  // one sentence
  std::span<const ParameterInfo* const> parameters;  // in the order in which a spec is printed

  // Devices need no table: kernels/dispatch.h goes by compress/codec_list.h and the element math.
  CodecOperations scalar;  // the normative reference
  CodecOperations simd;    // what runs; may be the reference's as long as there are no loops

  // The rest is null where the comment's default does.

  // Refuses parameters that are valid each for itself but not together. Default: all are good.
  absl::Status (*check)(const CodecSpec& spec) = nullptr;
  // CheckWire of bytes of the right length. Default: all decode.
  absl::Status (*check_wire)(const CodecSpec& spec, const uint8_t* wire, size_t numel) = nullptr;
  // The second hop's codec unless the spec names one. Default: the same.
  CodecSpec (*default_down)(const CodecSpec& up) = nullptr;
  // CodecSpec::AtStep. Default: the spec itself.
  CodecSpec (*at_step)(const CodecSpec& spec, uint64_t step) = nullptr;
  // Default: kUnused.
  MomentumNeed (*momentum)(const CodecSpec& spec) = nullptr;

  const ParameterInfo* FindParameter(std::string_view key) const;  // null: it has none such
};

const CodecInfo& InfoOf(CodecId id);

// The first of `names` with the smallest edit distance; there is at least one name.
std::string NearestOf(std::string_view wanted, const std::vector<std::string>& names);

// Parameters that several codecs have. A parameter of one codec stands in that codec's file.
namespace codecs {

extern const ParameterInfo kBlock;     // of codecs of blocks
extern const ParameterInfo kRounding;  // of codecs whose CodeFor has a stochastic sibling
extern const ParameterInfo kSeed;      // of whatever draws

// Parses "0" or "1" into `flag`; for a parameter's parse function.
std::optional<std::string> ParseFlag(const std::string& value, bool* flag);

}  // namespace codecs

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_INFO_H_
