// CodecInfo: all that the host knows about a codec: its parameters, its operations on each backend,
// and the few decisions that differ by codec. Each codec's .cc in compress/codecs/ defines one.
// Shard and Piece: what the operations work on.
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
// of a spec and a number of elements, so sizes are never sent. Head and codes are each padded to 16
// bytes. Blocks: all scales, then all codes. Entries: a count for each sub-block, then the entries.
struct ShardLayout {
  size_t blocks;       // number of scales of 2 bytes each, or of counts of 4
  size_t head_bytes;   // of the scales or counts, without padding
  size_t codes_at;     // bytes before the codes or entries
  size_t codes_bytes;  // without padding
  size_t bytes;        // in total
};

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel);

// Zeroes the padding after the head and after the codes.
void ZeroPadding(const ShardLayout& layout, uint8_t* wire);

// One shard's codec, and other data that its blocks need.
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
  int threshold = 0;   // for the widths
  size_t raised = 0;   // for blocks before this one it is lower by 1
  size_t next_at = 0;  // bytes of codes before the next block's
};

// Zeroes the code bytes after the last block's codes.
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
  Walk* const walk;  // kWidths: at the piece's first block, advanced to its end; null: no codes
  Draws draws;       // from the piece's first element on

  bool in_blocks() const { return shard.traits.kind == CodecKind::kBlocks; }
  size_t block() const { return shard.spec.block; }
  size_t full_blocks() const { return in_blocks() ? numel / block() : 0; }
  size_t rest() const { return in_blocks() ? numel % block() : 0; }  // elements after those blocks
  size_t scales_offset() const { return in_blocks() ? begin / block() * sizeof(uint16_t) : 0; }
  size_t codes_offset() const { return shard.layout.codes_at + begin * shard.traits.code_bits / 8; }
  size_t codes_bytes() const { return (numel * shard.traits.code_bits + 7) / 8; }

  // The part after the last full block.
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
  // Sets the field of the spec; or leaves it unchanged and returns the nearest valid value, as
  // text.
  std::optional<std::string> (*parse)(const std::string& value, CodecSpec* spec);
  std::string (*print)(const CodecSpec& spec);
};

// A codec's operations on one backend; those that its kind does not use are null.
struct CodecOperations {
  // All kinds but kEntries, on pieces of fp32 that begin on a block border. `g`, `r`, `out` and
  // `sum` begin at the piece, at any alignment; `wire` is the whole shard's.

  // Like Backend::EncodeAll of one shard; writes the piece's scales and codes but not the padding.
  // `r` may be null.
  void (*encode)(const Piece& piece, const float* g, float* r, uint8_t* wire) = nullptr;
  void (*decode)(const Piece& piece, const uint8_t* wire, float* out) = nullptr;
  void (*decode_add)(const Piece& piece, const uint8_t* wire, float* sum) = nullptr;
  // kWidths only. `heads` writes a piece's scales, and adds g to r where blocks are finite. After
  // the scales of all pieces are written, `begin` starts a walk, and `encode` advances it from the
  // first piece to the last: if r is not null it contains x, and g is not read. Decoding needs a
  // walk too.
  void (*heads)(const Piece& piece, const float* g, float* r, uint8_t* wire) = nullptr;
  void (*begin)(const Shard& shard, const uint8_t* wire, Walk* walk) = nullptr;
  // kWidths only. Like `encode` of x in r, then `decode`: computing the loss needs most of a
  // decoding.
  void (*encode_and_decode)(const Piece& piece, float* r, uint8_t* wire, float* out) = nullptr;
  // Backend::Reduce in one pass over the beginning of a piece; `up` and `down` cover the same
  // elements. Returns the number of elements done, 0 if there is no loop for `down`. `wires` are
  // whole shards, all else begins at the piece; null `codes`: no encoding.
  // Default: the other operations do it, one rank after the other.
  size_t (*reduce)(const Piece& up, const Piece& down, const simd::Reduction& args) = nullptr;

  // kEntries only, on whole shards.

  // Like Backend::EncodeAll of one shard of at least one element; the padding is already zero.
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
  std::span<const ParameterInfo* const> parameters;  // in the order of CodecSpec::ToString

  // Devices need no table: kernels/dispatch.h uses compress/codec_list.h and the element math.
  CodecOperations scalar;  // the normative reference
  CodecOperations simd;    // used by CpuBackend; may equal `scalar` while there are no loops

  // A null member means the default that its comment names.

  // Rejects parameters that are valid individually but not together. Default: all are valid.
  absl::Status (*check)(const CodecSpec& spec) = nullptr;
  // CheckWire of bytes of the right length. Default: all bytes decode.
  absl::Status (*check_wire)(const CodecSpec& spec, const uint8_t* wire, size_t numel) = nullptr;
  // The second hop's codec unless the spec names one. Default: the same codec.
  CodecSpec (*default_down)(const CodecSpec& up) = nullptr;
  // CodecSpec::AtStep. Default: the spec itself.
  CodecSpec (*at_step)(const CodecSpec& spec, uint64_t step) = nullptr;
  // Default: kUnused.
  MomentumNeed (*momentum)(const CodecSpec& spec) = nullptr;

  const ParameterInfo* FindParameter(std::string_view key) const;  // null if there is none
};

const CodecInfo& InfoOf(CodecId id);

// The first of `names` with the smallest edit distance; there is at least one name.
std::string NearestOf(std::string_view wanted, const std::vector<std::string>& names);

// Parameters that several codecs have. A parameter of only one codec is in that codec's file.
namespace codecs {

extern const ParameterInfo kBlock;     // codecs of blocks
extern const ParameterInfo kRounding;  // codecs with stochastic rounding
extern const ParameterInfo kSeed;      // codecs that draw random numbers

// Parses "0" or "1" into `flag`; for a parameter's parse function.
std::optional<std::string> ParseFlag(const std::string& value, bool* flag);

// SIMD operations of the codecs of blocks for which simd::EncodeBlocks has loops.
void EncodeSimdBlocks(const Piece& piece, const float* g, float* r, uint8_t* wire);
void DecodeSimdBlocks(const Piece& piece, const uint8_t* wire, float* out);
void DecodeAddSimdBlocks(const Piece& piece, const uint8_t* wire, float* sum);
size_t ReduceSimdBlocks(const Piece& up, const Piece& down, const simd::Reduction& args);

// The loops are those of int8, int4 and onebit, selected by the number of bits.
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
