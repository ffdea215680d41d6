// CodecTraits: the constants of a codec, which the compiler knows. CUDA files read this, so it has
// neither Abseil nor functions of the host.
#ifndef THINWIRE_COMPRESS_CODEC_TRAITS_H_
#define THINWIRE_COMPRESS_CODEC_TRAITS_H_

#include <cstdint>
#include <string_view>

namespace thinwire {

// A codec's place in compress/codec_list.h. Each codec names its own in its header; the numbers are
// part of the handshake.
enum class CodecId : uint8_t {};

enum class Rounding : uint8_t { kNearest = 0, kStochastic = 1 };

enum class CodecKind : uint8_t {
  kElements,  // each element for itself
  kBlocks,    // codes, and a scale for each block
  kEntries,   // the largest elements only, with their indices
  kWidths,    // codes of as many bits as suit their block, and a scale for each block
};

struct CodecTraits {
  CodecId id;
  std::string_view name;
  CodecKind kind;
  int code_bits;  // of an element, without the scale; 32 for an entry; kWidths: of the default
  int qmax = 0;   // largest code; 0 where elements have no shared scale
  bool has_kernels = true;  // kernels/ runs it on a device

  // Every rank gets every rank's entries: a shard has no owner, and there is no second hop.
  constexpr bool entries() const { return kind == CodecKind::kEntries; }
  // The scales of all blocks say what a block's codes are, and where.
  constexpr bool widths() const { return kind == CodecKind::kWidths; }
  // Encoding loses something that the next step makes up for.
  constexpr bool uses_feedback() const { return kind != CodecKind::kElements || qmax > 0; }
};

// Blocks are powers of two: a SIMD loop packs 128 codes at once, and blocks of two codecs nest.
inline constexpr uint32_t kMinBlock = 128;
inline constexpr uint32_t kMaxBlock = 4096;

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_TRAITS_H_
