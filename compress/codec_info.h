// CodecInfo: all that the host knows of a codec: its parameters, its operations on each backend,
// and the few decisions that differ by codec. Each codec's .cc in compress/codecs/ has one. Shard
// and Piece: what the operations work on.
#ifndef THINWIRE_COMPRESS_CODEC_INFO_H_
#define THINWIRE_COMPRESS_CODEC_INFO_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "compress/codec_spec.h"
#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {

struct EncodeArgs;
namespace simd {
struct Reduction;
}  // namespace simd

// Where the parts of an encoded shard lie; compress/FORMAT.md, "Layout". Sizes are exact functions
// of a spec and a number of elements, so that nobody sends a size. Head and codes are each padded
// to 16 bytes. Blocks: all scales, then all codes. Entries: a count for each sub-block, then the
// entries.
struct ShardLayout {
  size_t blocks;       // scales of 2 bytes each, or counts of 4
  size_t head_bytes;   // of the scales or counts, without the padding behind them
  size_t codes_at;     // bytes before the codes or entries
  size_t codes_bytes;  // without the padding behind them
  size_t bytes;        // in all
};

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel);

// Zeroes what lies behind the head and behind the codes.
void ZeroPadding(const ShardLayout& layout, uint8_t* wire);

// One shard's codec, and what its blocks need besides.
struct Shard {
  Shard(const CodecSpec& shard_spec, size_t numel, const Draws& shard_draws = {})
      : spec(shard_spec), traits(spec.traits()), layout(LayoutOf(spec, numel)), draws(shard_draws) {
    if (spec.hadamard || traits.widths()) TransformSigns(spec.seed, signs.data());
  }

  const CodecSpec& spec;
  const CodecTraits& traits;
  const ShardLayout layout;
  const Draws draws;
  alignas(64) std::array<float, kTransform> signs;  // set if the codec transforms
};

// Where the codes of a shard of kWidths are read or written, block after block: compress/FORMAT.md,
// "adaptive". CodecOperations::begin sets it to a shard's first block.
struct Walk {
  int threshold = 0;   // of the widths
  size_t raised = 0;   // blocks before this one take the threshold below
  size_t next_at = 0;  // bytes of codes before the next block's
};

// Zeroes the codes that no block has taken.
inline void ZeroBehind(const Shard& shard, const Walk& walk, uint8_t* wire) {
  std::memset(wire + shard.layout.codes_at + walk.next_at, 0,
              shard.layout.codes_bytes - walk.next_at);
}

// Elements [begin, begin + numel) of a dense shard; `begin` lies on a block border.
struct Piece {
  Piece(const Shard& of, size_t first, size_t count, Walk* of_wire = nullptr)
      : shard(of), begin(first), numel(count), walk(of_wire) {
    draws = shard.draws;
    draws.first += begin;
  }

  const Shard& shard;
  const size_t begin, numel;
  Walk* const walk;  // kWidths: has come to the piece, and is taken to its end; null: no codes
  Draws draws;       // of its first element on

  bool in_blocks() const { return shard.traits.kind == CodecKind::kBlocks; }
  size_t block() const { return shard.spec.block; }
  size_t full_blocks() const { return in_blocks() ? numel / block() : 0; }
  size_t rest() const { return in_blocks() ? numel % block() : 0; }  // elements behind those
  size_t scales_offset() const { return in_blocks() ? begin / block() * sizeof(uint16_t) : 0; }
  size_t codes_offset() const { return shard.layout.codes_at + begin * shard.traits.code_bits / 8; }
  size_t codes_bytes() const { return (numel * shard.traits.code_bits + 7) / 8; }

  // The part behind the last full block.
  Piece Tail() const {
    const size_t full = full_blocks() * block();
    return {shard, begin + full, numel - full};
  }
};

// A parameter of a spec. CodecSpec{} holds the defaults.
struct ParameterInfo {
  const char* key;
  const char* range;  // completes "expected ..."
  const char* help;   // one sentence, without the range
  // Sets the field of the spec; or leaves it and returns the nearest valid value, as text.
  std::optional<std::string> (*parse)(const std::string& value, CodecSpec* spec);
  std::string (*print)(const CodecSpec& spec);
};

// A codec's operations on one backend; those that its kind does not have are null.
struct CodecOperations {
  // All kinds but kEntries, on pieces of fp32 that begin on a block border. `g`, `r`, `out` and
  // `sum` are the piece's own, at any alignment; `wire` is the whole shard's.

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

  // kEntries only, on whole shards.

  // As Backend::EncodeAll of one shard of at least one element; the padding is zero already.
  void (*encode_entries)(const CodecSpec& spec, const EncodeArgs& args) = nullptr;
  void (*decode_entries)(const CodecSpec& spec, const uint8_t* wire,
                         const TensorView& out) = nullptr;
  // sum[i] += factor * value of every entry, product and sum rounded one after the other.
  void (*add_entries)(const CodecSpec& spec, const uint8_t* wire, float factor,
                      std::span<float> sum) = nullptr;
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

// SIMD operations of codecs of blocks whose code bits simd::EncodeBlocks has loops for.
void EncodeSimdBlocks(const Piece& piece, const float* g, float* r, uint8_t* wire);
void DecodeSimdBlocks(const Piece& piece, const uint8_t* wire, float* out);
void DecodeAddSimdBlocks(const Piece& piece, const uint8_t* wire, float* sum);
size_t ReduceSimdBlocks(const Piece& up, const Piece& down, const simd::Reduction& args);

// The loops are those of int8, int4 and onebit, told apart by their bits.
template <typename Codec>
constexpr CodecOperations SimdBlocksOf() {
  constexpr int kBits = Codec::kTraits.code_bits;
  static_assert(kBits == 8 || kBits == 4 || kBits == 1, "there is no SIMD loop for these codes");
  return {.encode = EncodeSimdBlocks,
          .decode = DecodeSimdBlocks,
          .decode_add = DecodeAddSimdBlocks,
          .reduce = ReduceSimdBlocks};
}

}  // namespace codecs

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_INFO_H_
