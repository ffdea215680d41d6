// The few types that every layer shares, and the constants of a codec. They are here because
// compress/ includes no other folder. CUDA files include this header, so it uses neither Abseil nor
// host-only functions.
#ifndef THINWIRE_COMPRESS_TYPES_H_
#define THINWIRE_COMPRESS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

namespace thinwire {

// Element types of gradients. The values are part of the C ABI and of the handshake.
enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
  }
  return "unknown dtype";
}

// Contiguous elements, not owned, in memory of the host or of the device that the view's user works
// with. On the host `data` may have any alignment, on a device it needs that of an element:
// frameworks pass slices from any element, and C callers pass any address.
struct TensorView {
  void* data = nullptr;
  size_t numel = 0;
  DType dtype = DType::kF32;

  size_t bytes() const { return numel * SizeOf(dtype); }

  // Elements [offset, offset + count); the caller keeps the range inside the view.
  TensorView Slice(size_t offset, size_t count) const {
    return {static_cast<uint8_t*>(data) + offset * SizeOf(dtype), count, dtype};
  }
};

// Elements [begin, end) of a bucket.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A momentum that the exchange keeps in place of the optimizer: the engine's, or topk's local one.
struct Momentum {
  float beta = 0.0f;
  bool nesterov = false;      // as in torch.optim.SGD
  float* velocity = nullptr;  // a float for each element; null: none, and beta is not read

  Momentum From(size_t element) const {
    return {beta, nesterov, velocity == nullptr ? nullptr : velocity + element};
  }
};

// CodecTraits: the compile-time constants of a codec.

// A codec's place in compress/codec_list.h. Each codec names its own in its header; the numbers are
// part of the handshake.
enum class CodecId : uint8_t {};

enum class Rounding : uint8_t { kNearest = 0, kStochastic = 1 };

enum class CodecKind : uint8_t {
  kElements,  // each element separately
  kBlocks,    // codes, and a scale for each block
  kEntries,   // the largest elements only, with their indices
  kWidths,    // codes whose bits depend on their block, and a scale for each block
};

struct CodecTraits {
  CodecId id;
  std::string_view name;
  CodecKind kind;
  int code_bits;            // per element, without the scale; entries: 32; kWidths: default
  int qmax = 0;             // largest code; 0 if elements have no shared scale
  bool has_kernels = true;  // kernels/ runs it on a device

  // Every rank gets every rank's entries: a shard has no owner, and there is no second hop.
  constexpr bool entries() const { return kind == CodecKind::kEntries; }
  // The scales of all blocks determine where a block's codes are and their width.
  constexpr bool widths() const { return kind == CodecKind::kWidths; }
  // Encoding has a loss that the next step compensates for.
  constexpr bool uses_feedback() const { return kind != CodecKind::kElements || qmax > 0; }
};

// Blocks are powers of two: a SIMD loop packs 128 codes at once, and blocks of two codecs nest.
inline constexpr uint32_t kMinBlock = 128;
inline constexpr uint32_t kMaxBlock = 4096;

// Access to elements at any alignment.
template <typename T>
T Get(const void* base, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(void* base, size_t i, T value) {
  std::memcpy(static_cast<uint8_t*>(base) + i * sizeof(T), &value, sizeof(T));
}

using Bytes = std::span<const uint8_t>;
using MutableBytes = std::span<uint8_t>;

// Device memory, or pinned host memory for a device, which its last owner frees.
using DeviceMemory = std::shared_ptr<uint8_t[]>;

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_TYPES_H_
