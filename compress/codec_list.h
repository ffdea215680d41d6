// The one list of all codecs. A codec is a line here, a header of element math, a section of
// FORMAT.md, a golden file, a SIMD loop and a benchmark row; tests/compress/format_test.cc fails
// while one of them is missing.
#ifndef THINWIRE_COMPRESS_CODEC_LIST_H_
#define THINWIRE_COMPRESS_CODEC_LIST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "compress/codec_id.h"

namespace thinwire {

struct CodecSpec;

enum class CodecKind : uint8_t {
  kElements,  // each element for itself
  kBlocks,    // codes, and a scale for each block
  kEntries,   // the largest elements only, with their places
};

struct CodecInfo {
  CodecId id;
  std::string_view name;
  CodecKind kind;
  int code_bits;                // of an element, without the scale; 32 for an entry
  int qmax;                     // largest code; 0 where elements have no shared scale
  std::string_view parameters;  // what its spec may hold, separated by commas
};

inline constexpr std::array<CodecInfo, 6> kCodecs = {{
    {CodecId::kFp32, "fp32", CodecKind::kElements, 32, 0, ""},
    {CodecId::kBf16, "bf16", CodecKind::kElements, 16, 0, ""},
    {CodecId::kInt8, "int8", CodecKind::kBlocks, 8, 127, "block,rounding,seed"},
    {CodecId::kInt4, "int4", CodecKind::kBlocks, 4, 7, "block,rounding,hadamard,seed"},
    {CodecId::kOneBit, "onebit", CodecKind::kBlocks, 1, 1, "block"},
    {CodecId::kTopK, "topk", CodecKind::kEntries, 32, 0, "density,warmup,masking"},
}};

constexpr const CodecInfo& InfoOf(CodecId id) { return kCodecs[static_cast<size_t>(id)]; }

// Blocks are powers of two: a SIMD loop packs 128 codes at once, and blocks of two codecs nest.
inline constexpr uint32_t kMinBlock = 128;
inline constexpr uint32_t kMaxBlock = 4096;

// Where the parts of an encoded shard lie, each padded to 16 bytes. Blocks: all scales, then all
// codes. Entries: a count for each sub-block, then the entries.
struct ShardLayout {
  size_t blocks;       // scales of 2 bytes each, or counts of 4
  size_t codes_at;     // bytes before the codes or entries
  size_t codes_bytes;  // without the padding behind them
  size_t bytes;        // in all

  size_t head_bytes(const CodecInfo& info) const {
    return blocks * (info.kind == CodecKind::kEntries ? sizeof(uint32_t) : sizeof(uint16_t));
  }
};

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_LIST_H_
