// CodecSpec: which codec, with which parameters. Both ends of a message must hold equal specs.
#ifndef THINWIRE_COMPRESS_CODEC_SPEC_H_
#define THINWIRE_COMPRESS_CODEC_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace thinwire {

// Version of the bytes in compress/FORMAT.md. It is part of the handshake.
inline constexpr uint32_t kWireVersion = 1;

// The values are part of the handshake.
enum class CodecId : uint8_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };

struct CodecSpec {
  CodecId id = CodecId::kFp32;
  uint32_t block = 256;  // elements that share one scale; unused by fp32 and bf16

  // Parses "name" or "name:key=value,key=value". An unknown name or key, or a value out of range,
  // is InvalidArgument and names the nearest valid one.
  static absl::StatusOr<CodecSpec> Parse(std::string_view text);

  // The canonical form: Parse(ToString()) == *this; defaults are left out.
  std::string ToString() const;

  // True if encoding loses something, so that error feedback has something to keep.
  bool lossy() const { return id != CodecId::kFp32; }

  friend bool operator==(const CodecSpec&, const CodecSpec&) = default;
};

// Exact size in bytes of an encoded shard of `numel` elements; 0 for none.
size_t EncodedBytes(const CodecSpec& spec, size_t numel);

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_SPEC_H_
