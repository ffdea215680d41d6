// The one list of all codecs. A codec is a line here, a header of element math, a section of
// FORMAT.md, a golden file, a SIMD loop and a benchmark row; tests/compress/codec_list_test.cc
// fails while one of them is missing.
#ifndef THINWIRE_COMPRESS_CODEC_LIST_H_
#define THINWIRE_COMPRESS_CODEC_LIST_H_

#include <array>
#include <string_view>

#include "compress/codec_spec.h"

namespace thinwire {

struct CodecInfo {
  CodecId id;
  std::string_view name;
  int code_bits;  // an element, without the scale
  int qmax;       // largest code; 0 where elements have no shared scale
};

inline constexpr std::array<CodecInfo, 4> kCodecs = {{
    {CodecId::kFp32, "fp32", 32, 0},
    {CodecId::kBf16, "bf16", 16, 0},
    {CodecId::kInt8, "int8", 8, 127},
    {CodecId::kInt4, "int4", 4, 7},
}};

constexpr const CodecInfo& InfoOf(CodecId id) { return kCodecs[static_cast<size_t>(id)]; }

// Blocks are powers of two: a SIMD loop packs 128 codes at once, and blocks of two codecs nest.
inline constexpr uint32_t kMinBlock = 128;
inline constexpr uint32_t kMaxBlock = 4096;

// Where the parts of an encoded shard lie: all scales, then all codes, each padded to 16 bytes.
struct ShardLayout {
  size_t blocks;       // scales, of 2 bytes each
  size_t codes_at;     // bytes before the codes
  size_t codes_bytes;  // without the padding behind them
  size_t bytes;        // in all
};

ShardLayout LayoutOf(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_LIST_H_
